"""Makes a plan of a study's file: its arms, on each task and at each size."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task, rule_plugin
from deltalab.study.planning.config_difference import difference
from deltalab.study.planning.feasibility import check_space
from deltalab.study.planning.matching import Matcher
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.specs.ladder_sizes import at_fault, sized
from deltalab.study.specs.method_settings import (
    applied,
    resolve_method,
    rule_of,
)
from deltalab.study.specs.overrides import Given, read_overrides, where_given
from deltalab.study.specs.study_file import MOST_ARMS, Change, StudySpec, load_study


def plan_study(study: str | Path | Mapping[str, Any], *, profile: str | None = None, overrides: Given = None) -> Plan:
    """Reads a study as `load_study` does, and expands it as `make_plan` does; errors say whether the file or an
    override is wrong.
    """
    file = "study" if isinstance(study, Mapping) else str(study)
    spec = load_study(study, profile=profile, overrides=overrides)
    try:
        plan = make_plan(spec, profile=profile, where=where_given(file, overrides))
    except InputError:
        if overrides:  # The file may be wrong by itself: then this raises what is wrong there.
            make_plan(load_study(study, profile=profile), profile=profile, where=file)
        raise
    return replace(plan, where=file, overrides=read_overrides(overrides))


def make_plan(spec: StudySpec, *, profile: str | None = None, where: str = "study") -> Plan:
    """Expands a study.

    Raises `InputError` for rules, knobs, tasks and settings that do not exist, for values that make no model, for arms
    that equal the base or one another, and for parts to take away that the method does not have.
    """
    try:
        return _make_plan(spec, profile, where)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _make_plan(spec: StudySpec, profile: str | None, file: str) -> Plan:
    tasks = {}
    base_width = spec.base.model.get("base_width") or spec.base.model.get("d_model", ModelSpec.d_model)
    sizes = {one.label: one for one in sized(spec.scales, spec.task, base_width)}
    for label, one in sizes.items():
        kind = one.params.get("task", one.task)
        if not isinstance(kind, str):
            raise InputError(f"task.{one.task}.task must be a task's name, not {kind!r}")
        try:
            tasks[label] = get_task(kind, **{key: value for key, value in one.params.items() if key != "task"})
        except InputError as error:
            written = {key: value for key, value in spec.task[one.task].items() if key != "task"}
            size = at_fault(spec.scales, ["task"], error, partial(get_task, kind, **written))
            # Where one task has several names in the study, say which of them is meant.
            own = "" if one.task == kind else f"task.{one.task}: "
            raise InputError(f"{size}{own}{error}") from None
    for name in spec.for_task:
        if name not in spec.task:
            raise unknown("task", name, spec.task, where="for_task")
    changes = _changes(spec)
    finalists = spec.search.finalists if spec.search else 0
    if (count := len(tasks) * (1 + len(changes) + finalists)) > MOST_ARMS:
        raise InputError(f"has {count:,} arms, counted on each task; a study has at most {MOST_ARMS:,}")
    matcher = Matcher(spec.tune.searched if spec.tune else {})
    arms = []
    for task_name, task in tasks.items():
        at = sizes[task_name]
        unsized = applied(spec.base, spec.for_task.get(at.task, Change()))
        base = applied(unsized, Change(model=at.model, train=at.train))
        resolved = {}
        for name, change in {"base": Change(), **changes}.items():
            where = name if name == "base" else f"arms.{name}"
            try:
                resolved[name] = resolve_method(applied(base, change), task, where=where)
            except InputError as error:
                plain = partial(resolve_method, applied(unsized, change), task, where=where)
                size = at_fault(spec.scales, ["model", "train"], error, plain)
                said = f"{where} at {task_name}{str(error).removeprefix(where)}" if size else error
                raise InputError(f"{size}{said}") from None
            if change.match is not None:
                try:
                    resolved[name] = matcher.matched(change.match, resolved["base"], resolved[name], task.length)
                except InputError as error:
                    raise InputError(f"arms.{name}.match on task '{task_name}': {error}") from None
        seen: dict[str, str] = {}
        for name, config in resolved.items():
            twin = seen.setdefault(json.dumps(config, sort_keys=True), name)
            if twin != name:
                raise InputError(
                    f"arm '{name}' is the same as {twin if twin == 'base' else repr(twin)} on task '{task_name}'"
                )
            change_of = difference(resolved["base"], config)
            arms.append(PlannedArm(name, task_name, name == "base", config, change_of))
        for i in range(finalists):
            arms.append(PlannedArm(f"found_{i + 1}", task_name, False, resolved["base"], {}))
    plan = Plan(spec, profile, arms, tasks, file)
    if plan.budget is None:
        return plan
    return replace(plan, notes=tuple(check_space(plan)))


def _changes(spec: StudySpec) -> dict[str, Change]:
    """Every arm but the base: first those that `ablate` and `factorial` generate, then those of `arms`."""
    base = rule_of(spec.base.rule)
    changes: dict[str, Change] = {}
    for part in spec.ablate:
        if f"without_{part}" in changes:
            raise InputError(f"ablate: '{part}' is given twice")
        changes[f"without_{part}"] = _without(base, [part], "ablate")
    for pair in spec.factorial:
        changes["_".join(f"without_{part}" for part in pair)] = _without(base, list(pair), "factorial")
        for part in pair:
            changes.setdefault(f"without_{part}", _without(base, [part], "factorial"))
    for name, change in spec.arms.items():
        if name == "base" or name in changes:
            raise InputError(f"arms.{name}: there is such an arm already")
        changes[name] = change
    return changes


# Parts of the model that can be taken away -> the value that takes them away.
_MODEL_PARTS: dict[str, object] = {
    "output_gate": False,
    "output_norm": False,
    "conv": 0,
    "mlp": False,
    "rope": False,
    "qk_norm": False,
    "token_shift": False,
}


def _without(rule: Mapping[str, Any], parts: list[str], key: str) -> Change:
    kind: Any = rule_plugin(rule["name"]).kind
    knobs, model = {}, {}
    for part in parts:
        if part in _MODEL_PARTS:
            model[part] = _MODEL_PARTS[part]
        elif part in kind.options():
            knobs[part] = kind(**{part: kind.without(part)}).spec()[part]
        else:
            raise unknown("part", part, [*kind.options(), *_MODEL_PARTS], where=key)
    return Change(rule=knobs or None, model=model)
