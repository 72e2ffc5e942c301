"""Makes the first candidates of a search: rules that its file names, and the best candidates of earlier studies."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.settings.layer_list import RULE
from deltalab.store import Store
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.method_settings import resolve_rule, rule_of, with_values
from deltalab.study.specs.recorded_study import RecordedSpec, recorded_tasks
from deltalab.study.specs.sections.budget import Searching
from deltalab.study.specs.sections.search_space import LAYERS, Search
from deltalab.study.specs.setting_paths import setting

MOST_RECORDED = 0.25
"""The most candidates of an earlier study that a search takes, as a share of its trials."""


def named_candidates(plan: Plan) -> list[dict[str, Any]]:
    """Makes the candidates of the rules that `warm` names, with the base's model and training.

    A setting of the base that the space lacks takes the first value that the space has.

    Raises:
        InputError: A rule does not exist or is outside of the space.
    """
    space = plan.spec.search
    entries = [entry for entry in space.warm if not _study(entry)] if space else []
    return [_of_rule(plan, space, entry) for entry in entries if space]


def recorded_candidates(plan: Plan, store: Store) -> list[dict[str, Any]]:
    """Takes candidates from the studies that `warm` names, the best of each study first.

    A candidate is taken if the space can make its rule and has the values of its other settings.

    Raises:
        InputError: The ledger lacks a study, or a study has no candidate that the space has.
    """
    candidates: list[dict[str, Any]] = []
    for study in _studies(plan):
        assert plan.spec.search is not None
        try:
            ranked = _ranked(store, study)
        except InputError as error:
            raise InputError(f"{plan.study_file}: search.warm: {error}") from None
        inside = (_inside(plan, plan.spec.search, values, config) for values, config in ranked)
        fitting = [values for values in inside if values is not None]
        if not ranked:
            raise InputError(f"{plan.study_file}: search.warm: study '{study}' has no candidates of a search")
        if not fitting:
            raise InputError(f"{plan.study_file}: search.warm: no candidate of study '{study}' is in the space")
        most = max(1, math.floor(MOST_RECORDED * plan.spec.search.trials))
        candidates += [values for values in fitting[:most] if values not in candidates]
    return candidates


def require_recorded(plan: Plan, db: str | Path | None) -> None:
    """Raises `InputError` if the ledger lacks what `warm` names. Makes no database if there is none."""
    if studies := _studies(plan):
        if not Store.exists(db):
            raise InputError(f"{plan.study_file}: search.warm: there is no ledger with study '{studies[0]}' yet")
        with Store.open(db, create=False) as store:
            recorded_candidates(plan, store)


def _studies(plan: Plan) -> list[str]:
    """The studies that `warm` names."""
    return [study for study in map(_study, plan.spec.search.warm if plan.spec.search else ()) if study]


def _study(entry: str | Mapping[str, Any]) -> str | None:
    """The study that an entry of `warm` names; None if the entry is a rule."""
    return entry["study"] if isinstance(entry, Mapping) and "study" in entry else None


def _inside(plan: Plan, space: Searching, values: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A recorded candidate, which trained with `config`, as the space spells it; None if the space lacks it."""
    if space.drawn(values) is not None:
        return values
    base = next(arm for arm in plan.arms if arm.is_base)
    others = [path for path in values if not path.startswith(("rule", "train.")) and path not in space.searched]
    try:
        if any(setting(base.config, path, "warm") != values[path] for path in others):
            return None
        spelled = _with_rule(plan, space, resolve_rule(config["rule"]), config)
        same = all(setting(config, path, "warm") == spelled[path] for path in spelled if not path.startswith("rule"))
    except InputError:
        return None
    return spelled if same else None


def _of_rule(plan: Plan, space: Searching, entry: str | Mapping[str, Any]) -> dict[str, Any]:
    """The candidate of a rule that `warm` names; raises `InputError` for a rule that is not in the space."""
    base = next(arm for arm in plan.arms if arm.is_base)
    try:
        wanted = resolve_rule(rule_of(entry))
    except InputError as error:
        raise InputError(f"warm: {error}") from None
    return _with_rule(plan, space, wanted, base.config)


def _with_rule(plan: Plan, space: Searching, wanted: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The candidate of a rule, with those values of a configuration's model and training that the space has.

    Raises `InputError` for a rule outside of the space.
    """
    base = next(arm for arm in plan.arms if arm.is_base)
    choices = space.searched["rule"].choice or () if "rule" in space.searched else (base.config["rule"],)
    alike = [choice for choice in choices if rule_of(choice)["name"] == wanted["name"]]
    if not alike:
        names = dict.fromkeys(rule_of(choice)["name"] for choice in choices)
        raise unknown("rule", wanted["name"], names, where="warm")
    problem = ""
    for choice in alike:

        def ask(name: str, knob: Search, choice: Any = choice) -> Any:
            if name == "rule":
                return choice
            return _in_rule(wanted, name, knob) if name.startswith("rule.") else _as_in(config, name, knob)

        candidate = space.draw(ask)
        try:
            rule = resolve_rule(plan.with_values(base, candidate)["rule"])
        except InputError as error:
            problem = str(error)
            continue
        if rule == wanted:
            return candidate
        apart = next(knob for knob in wanted if rule[knob] != wanted[knob])
        problem = f"it has {apart} {_text(wanted[apart])}, and the space {_text(rule[apart])}"
    raise InputError(f"warm: rule '{wanted['name']}' is outside of the space: {problem}")


def _in_rule(wanted: Mapping[str, Any], path: str, knob: Search) -> Any:
    """The value of a knob in a rule, as the space spells it; the knob's first value if the space lacks the rule's."""
    if knob.choice is None:
        value = setting({"rule": wanted}, path, "warm")
        return value if knob.holds(value) else knob.extremes[0]
    for value in knob.choice:
        try:
            changed = with_values({"rule": wanted}, {path: value}, where="warm")["rule"]
            if resolve_rule(changed) == wanted:
                return value
        except InputError:
            continue  # The rule refuses the value beside its others.
    return knob.choice[0]


def _as_in(config: Mapping[str, Any], name: str, knob: Search) -> Any:
    """The value of a knob of model or training in a configuration; the knob's first value if the space lacks it."""
    value: Any = RULE if name.startswith(f"{LAYERS}[") else setting(config, name.removesuffix(".length"), "warm")
    return value if knob.holds(value) else knob.extremes[0]


def _text(value: object) -> str:
    """A value of a knob in one line."""
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _ranked(store: Store, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The candidates of a study by their mean rank over its tasks, each as its values and its configuration."""
    study = store.study(name)
    tasks = recorded_tasks(study)
    scores: dict[str, dict[str, float]] = {task: {} for task in tasks}
    validation: dict[tuple[str, str], list[float]] = {}
    for final in store.final_metrics(study.id, stage="tune"):
        if final.split == "validation":
            validation.setdefault((final.trial, final.metric), []).append(final.value)
    base = next(arm.name for arm in store.arms(study.id) if arm.is_base)
    is_search = RecordedSpec(study.spec).is_search
    # A finalist's tuned training is that of one task.
    trained = [trial for trial in store.trials(study.id) if trial.arm == base or not is_search]
    configs: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for trial in sorted(trained, key=lambda trial: trial.finished_at):
        task = tasks[trial.task]
        if by_seed := validation.get((trial.key, task.metric)):
            mean = math.fsum(by_seed) / len(by_seed)
            candidate = json.dumps([trial.values, trial.config["rule"]])
            configs[candidate] = trial.values, trial.config
            scores[trial.task][candidate] = -task.sign * mean
    ranks: dict[str, list[int]] = {}
    for of_task in scores.values():
        for rank, candidate in enumerate(sorted(of_task, key=of_task.__getitem__)):
            ranks.setdefault(candidate, []).append(rank)
    order = sorted(ranks, key=lambda candidate: sum(ranks[candidate]) / len(ranks[candidate]))
    return [configs[candidate] for candidate in order]
