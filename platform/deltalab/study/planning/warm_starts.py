"""The candidates that a search begins with: named rules, and the best of an earlier study."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError, unknown
from deltalab.models.spec import RULE
from deltalab.store import Store
from deltalab.study.specs.budget import Searching
from deltalab.study.specs.method_settings import resolve_rule, rule_of, setting, with_values
from deltalab.study.specs.search_space import LAYERS, Search

if TYPE_CHECKING:
    from deltalab.study.planning.plan import Plan

MOST_RECORDED = 0.25
"""The candidates of an earlier study that a search takes at the most, as a share of its trials."""


def named(plan: "Plan") -> list[dict[str, Any]]:
    """The candidates of the rules that `warm` names. Model and training are the base's, where the space has its values.

    Raises `InputError` for a rule that does not exist, and for one outside of the space.
    """
    space = plan.spec.search
    entries = [entry for entry in space.warm if not _study(entry)] if space else []
    return [_of_rule(plan, space, entry) for entry in entries if space]


def recorded(plan: "Plan", store: Store) -> list[dict[str, Any]]:
    """The candidates of the studies that `warm` names that the space has, the best of each study first.

    The space has a candidate where it can make its rule and has the values of its other settings. Raises `InputError`
    for a study that the ledger does not have, and for one without such a candidate.
    """
    found: list[dict[str, Any]] = []
    for study in _studies(plan):
        assert plan.spec.search is not None
        try:
            ranked = _ranked(store, study)
        except InputError as error:
            raise InputError(f"{plan.where}: search.warm: {error}") from None
        inside = (_inside(plan, plan.spec.search, values, config) for values, config in ranked)
        fits = [values for values in inside if values is not None]
        if not ranked:
            raise InputError(f"{plan.where}: search.warm: study '{study}' has no candidates of a search")
        if not fits:
            raise InputError(f"{plan.where}: search.warm: no candidate of study '{study}' is in the space")
        most = max(1, math.floor(MOST_RECORDED * plan.spec.search.trials))
        found += [values for values in fits[:most] if values not in found]
    return found


def demand(plan: "Plan", db: str | Path | None) -> None:
    """Raises `InputError` where the ledger has not what `warm` names. It makes no database where there is none."""
    if studies := _studies(plan):
        if not Store.exists(db):
            raise InputError(f"{plan.where}: search.warm: there is no ledger with study '{studies[0]}' yet")
        with Store.open(db, create=False) as store:
            recorded(plan, store)


def _studies(plan: "Plan") -> list[str]:
    """The studies that `warm` names."""
    return [study for study in map(_study, plan.spec.search.warm if plan.spec.search else ()) if study]


def _study(entry: str | Mapping[str, Any]) -> str | None:
    return entry["study"] if isinstance(entry, Mapping) and "study" in entry else None


def _inside(plan: "Plan", space: Searching, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A recorded candidate as the space spells it; None where the space lacks it. config: what it trained with."""
    if space.drawn(values) is not None:
        return values
    base = next(arm for arm in plan.arms if arm.is_base)
    others = [path for path in values if not path.startswith(("rule", "train.")) and path not in space.searched]
    try:
        if any(setting(base.config, path, "warm") != values[path] for path in others):
            return None
        found = _with_rule(plan, space, resolve_rule(config["rule"]), config)
        same = all(setting(config, path, "warm") == found[path] for path in found if not path.startswith("rule"))
    except InputError:
        return None
    return found if same else None


def _of_rule(plan: "Plan", space: Searching, entry: str | Mapping[str, Any]) -> dict[str, Any]:
    base = next(arm for arm in plan.arms if arm.is_base)
    try:
        wanted = resolve_rule(rule_of(entry))
    except InputError as error:
        raise InputError(f"warm: {error}") from None
    return _with_rule(plan, space, wanted, base.config)


def _with_rule(plan: "Plan", space: Searching, wanted: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The candidate of a rule, with the model and the training of a configuration where the space has their values.

    Raises `InputError` for a rule outside of the space.
    """
    base = next(arm for arm in plan.arms if arm.is_base)
    choices = space.searched["rule"].choice or () if "rule" in space.searched else (base.config["rule"],)
    alike = [choice for choice in choices if rule_of(choice)["name"] == wanted["name"]]
    if not alike:
        raise unknown("rule", wanted["name"], dict.fromkeys(rule_of(one)["name"] for one in choices), where="warm")
    missed = ""
    for choice in alike:

        def ask(name: str, knob: Search, choice: Any = choice) -> Any:
            if name == "rule":
                return choice
            return _in_rule(wanted, name, knob) if name.startswith("rule.") else _as_in(config, name, knob)

        candidate = space.draw(ask)
        try:
            found = resolve_rule(plan.with_values(base, candidate)["rule"])
        except InputError as error:
            missed = str(error)
            continue
        if found == wanted:
            return candidate
        apart = next(knob for knob in wanted if found[knob] != wanted[knob])
        missed = f"it has {apart} {_said(wanted[apart])}, and the space {_said(found[apart])}"
    raise InputError(f"warm: rule '{wanted['name']}' is outside of the space: {missed}")


def _in_rule(wanted: Mapping[str, Any], path: str, knob: Search) -> Any:
    """The value that a knob has in a rule, as the space spells it; the first one where it has none of them."""
    if knob.choice is None:
        own = setting({"rule": wanted}, path, "warm")
        return own if knob.holds(own) else knob.extremes[0]
    for value in knob.choice:
        try:
            changed = with_values({"rule": wanted}, {path: value}, where="warm")["rule"]
            if resolve_rule(changed) == wanted:
                return value
        except InputError:
            continue  # The rule refuses the value beside its others.
    return knob.choice[0]


def _as_in(config: Mapping[str, Any], name: str, knob: Search) -> Any:
    """The value that a knob of the model or the training has in a configuration; the first one where it has none."""
    own: Any = RULE if name.startswith(f"{LAYERS}[") else setting(config, name.removesuffix(".length"), "warm")
    return own if knob.holds(own) else knob.extremes[0]


def _said(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _ranked(store: Store, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The candidates of a study, by their mean rank over its tasks: their values, and what they trained with."""
    study = store.study(name)
    scores: dict[str, dict[str, float]] = {task: {} for task in study.provenance["tasks"]}
    validation: dict[tuple[str, str], list[float]] = {}
    for final in store.final_metrics(study.id, stage="tune"):
        if final.split == "validation":
            validation.setdefault((final.trial, final.metric), []).append(final.value)
    base = next(arm.name for arm in store.arms(study.id) if arm.is_base)
    # A finalist's tuned training is that of one task.
    trained = [trial for trial in store.trials(study.id) if trial.arm == base or not study.spec.get("search")]
    configs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for trial in sorted(trained, key=lambda trial: trial.finished_at):
        about = study.provenance["tasks"][trial.task]
        if found := validation.get((trial.key, about["metric"])):
            mean = math.fsum(found) / len(found)
            candidate = json.dumps([trial.values, trial.config["rule"]])
            configs[candidate] = trial.values, trial.config
            scores[trial.task][candidate] = -mean if about["maximize"] else mean
    ranks: dict[str, list[int]] = {}
    for of_task in scores.values():
        for rank, candidate in enumerate(sorted(of_task, key=of_task.__getitem__)):
            ranks.setdefault(candidate, []).append(rank)
    order = sorted(ranks, key=lambda candidate: sum(ranks[candidate]) / len(ranks[candidate]))
    return [configs[candidate] for candidate in order]
