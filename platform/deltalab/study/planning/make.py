"""Makes the plan of a study: its arms on each task and at each size."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, shortened, unknown
from deltalab.models.costs import CostCounter
from deltalab.models.hybrids import PRESET
from deltalab.models.published import written_out
from deltalab.models.settings.layer_list import OF_A_MIXER
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.registry import get_task, rule_plugin
from deltalab.study.planning.config_difference import difference
from deltalab.study.planning.engine_limits import (
    refuse_missing_data,
    refuse_what_no_engine_measures,
    refuse_what_no_engine_trains,
)
from deltalab.study.planning.engine_recipe import study_recipe
from deltalab.study.planning.feasibility import check_space
from deltalab.study.planning.further_metrics import further_metrics
from deltalab.study.planning.matching import Matcher
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.specs.method_settings import FLOPS, resolve, resolve_method, rule_of, with_change, within_flops
from deltalab.study.specs.overrides import Overrides, error_prefix, read_overrides
from deltalab.study.specs.sections.ladder_sizes import keys_at_fault, tasks_at_sizes
from deltalab.study.specs.study_file import MOST_ARMS, Change, Method, StudySpec, load_study
from deltalab.tasks import Task


def plan_study(
    study_file: str | Path | Mapping[str, Any], *, profile: str | None = None, overrides: Overrides = None
) -> Plan:
    """Reads a study as `load_study` does, and expands it as `make_plan` does.

    An error says whether the study's file or an override is wrong, and names the override.

    Args:
        study_file: The path of a study's file, the name of a shipped study, or the mapping that a file would hold.
        profile: One of the study's profiles.
        overrides: Settings in place of the file's, as `deltalab.study.specs.overrides` explains them.
    """
    shown = "study" if isinstance(study_file, Mapping) else str(study_file)
    try:
        plan = _planned(study_file, profile, overrides)
    except InputError as error:
        if overrides:
            raise InputError(_with_the_override(str(error), study_file, profile, overrides)) from None
        raise
    return replace(plan, study_file=shown, overrides=read_overrides(overrides))


def _planned(study_file: str | Path | Mapping[str, Any], profile: str | None, overrides: Overrides) -> Plan:
    shown = "study" if isinstance(study_file, Mapping) else str(study_file)
    spec = load_study(study_file, profile=profile, overrides=overrides)
    return make_plan(spec, profile=profile, study_file=error_prefix(shown, overrides))


def _with_the_override(
    error: str, study_file: str | Path | Mapping[str, Any], profile: str | None, overrides: Overrides
) -> str:
    """Returns an error with the override that causes it: the last of the fewest that have this error together.

    An error that the file has by itself, or that names its override, stays as it is.
    """
    shown = "study" if isinstance(study_file, Mapping) else str(study_file)
    place = error_prefix(shown, overrides)
    if not error.startswith(place):
        return error
    try:
        _planned(study_file, profile, None)
    except InputError as of_file:
        if str(of_file) == error.replace(place, shown, 1):
            return str(of_file)
    words = list(overrides or ())
    for count, word in enumerate(words, 1):
        first: Overrides = words[:count]
        if isinstance(overrides, Mapping):
            first = {key: overrides[key] for key in words[:count]}
        try:
            _planned(study_file, profile, first)
        except InputError as wrong:
            if str(wrong) == error:
                rest = error.removeprefix(place)
                return error if word.partition("=")[0] in rest else f"{place}: {shortened(word, 100)}{rest}"
    return error


def make_plan(spec: StudySpec, *, profile: str | None = None, study_file: str = "study") -> Plan:
    """Expands a study.

    Args:
        spec: The study, with its profile in place.
        profile: The name of that profile.
        study_file: What errors call the study.

    Raises:
        InputError: A rule, knob, task or setting does not exist, values make no model, two arms are the same, or the
            method does not have a part that an arm takes away.
    """
    try:
        return _make_plan(spec, profile, study_file)
    except InputError as error:
        raise InputError(f"{study_file}: {error}") from None


def _make_plan(spec: StudySpec, profile: str | None, study_file: str) -> Plan:
    tasks = {}
    base_width = spec.base.model.get("base_width") or spec.base.model.get("d_model", ModelSpec.d_model)
    sized_tasks = {sized.label: sized for sized in tasks_at_sizes(spec.scales, spec.task, base_width)}
    for label, sized in sized_tasks.items():
        kind = sized.params.get("task", sized.task)
        if not isinstance(kind, str):
            raise InputError(f"task.{sized.task}.task must be a task's name, not {kind!r}")
        try:
            tasks[label] = get_task(kind, **{key: value for key, value in sized.params.items() if key != "task"})
        except InputError as error:
            refuse_missing_data(spec.engine, sized.task, sized.params.get("corpus"))
            written = {key: value for key, value in spec.task[sized.task].items() if key != "task"}
            keys = keys_at_fault(spec.scales, ["task"], error, partial(get_task, kind, **written))
            # If one task has several names in the study, say which of them is meant.
            name = "" if sized.task == kind else f"task.{sized.task}: "
            raise InputError(f"{keys}{name}{error}") from None
    for name in spec.for_task:
        if name not in spec.task:
            raise unknown("task", name, spec.task, where="for_task")
    refuse_what_no_engine_measures(spec.engine, tasks)
    further = tuple(further_metrics(spec, tasks))
    _refuse_margins(spec, tasks, [of["metric"] for of in further])
    changes = _changes(spec)
    finalists = spec.search.finalists if spec.search else 0
    if (count := len(tasks) * (1 + len(changes) + finalists)) > MOST_ARMS:
        raise InputError(f"has {count:,} arms, counted on each task; a study has at most {MOST_ARMS:,}")
    counter = CostCounter()
    arms, recipe = [], None
    for task_name, task in tasks.items():
        sized = sized_tasks[task_name]
        tune = spec.tune_on(sized.task)
        matcher = Matcher(tune.searched if tune else {})
        start, sizes = _sized_preset(spec.base, sized.model)
        for_task = spec.for_task.get(sized.task, Change())
        unsized = with_change(spec.base, for_task)
        base = with_change(with_change(start, for_task), Change(model=sizes, train=sized.train))
        recipe = recipe or study_recipe(spec, base, task)
        if recipe is not None:
            base = recipe.applied(base, task.length)
        flops, resolved = base.train.get(FLOPS), {}
        for name, change in {"base": Change(), **changes}.items():
            where = name if name == "base" else f"arms.{name}"
            try:
                resolved[name] = resolve_method(with_change(base, change), task, counter, where=where)
            except InputError as error:
                plain = partial(resolve_method, with_change(unsized, change), task, counter, where=where)
                keys = keys_at_fault(spec.scales, ["model", "train"], error, plain)
                problem = f"{where} at {task_name}{str(error).removeprefix(where)}" if keys else error
                raise InputError(f"{keys}{problem}") from None
            if change.match is not None:
                try:
                    resolved[name] = matcher.matched(change.match, resolved["base"], resolved[name], task.length)
                    if flops is not None:
                        resolved[name] = resolve(within_flops(resolved[name], flops), task, counter)
                except InputError as error:
                    raise InputError(f"arms.{name}.match on task '{task_name}': {error}") from None
        seen: dict[str, str] = {}
        for name, config in resolved.items():
            twin = seen.setdefault(json.dumps(config, sort_keys=True), name)
            if twin != name:
                same = twin if twin == "base" else repr(twin)
                raise InputError(f"arm '{name}' is the same as {same} on task '{task_name}'", key=name)
            change_of = difference(resolved["base"], config)
            arms.append(PlannedArm(name, task_name, name == "base", config, change_of, flops))
        for i in range(finalists):
            arms.append(PlannedArm(f"found_{i + 1}", task_name, False, resolved["base"], {}, flops))
    notes = () if recipe is None else (recipe.note(arms[0].config, tasks[arms[0].task].length),)
    plan = Plan(spec, profile, arms, tasks, study_file, notes, further=further)
    refuse_what_no_engine_trains(plan)
    if plan.budget is None:
        return plan
    return replace(plan, notes=(*notes, *check_space(plan)))


def _refuse_margins(spec: StudySpec, tasks: Mapping[str, Task], further: list[str]) -> None:
    """Refuses the margin of a metric that the study does not compare, or one that no difference can exceed."""
    compared = {task.metric: task for task in tasks.values()}
    for metric, margin in spec.margin.items():
        if metric in further:
            continue
        if metric not in compared:
            raise unknown("metric", metric, [*compared, *further], where="margin")
        bounds = compared[metric].bounds
        if bounds and margin >= bounds[1] - bounds[0]:
            raise InputError(
                f"margin.{metric} must be below {bounds[1] - bounds[0]:g}, the most that two scores differ"
            )


def _sized_preset(base: Method, sizes: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """Moves the depth, heads and width of a size into a base that is a preset, so that it stays one of that size."""
    if PRESET not in base.model:
        return base, dict(sizes)
    of_preset = {key: value for key, value in sizes.items() if key in ("layers", "heads", "d_model")}
    rest = {key: value for key, value in sizes.items() if key not in of_preset}
    return base.model_copy(update={"model": {**base.model, **of_preset}}), rest


def _changes(spec: StudySpec) -> dict[str, Change]:
    """Lists every arm but the base: first those that `ablate` and `factorial` generate, then those of `arms`."""
    base, _ = written_out(rule_of(spec.base.rule), {})
    changes: dict[str, Change] = {}
    for part in spec.ablate:
        if f"without_{part}" in changes:
            raise InputError(f"'{part}' is given twice", where="ablate", key=part)
        changes[f"without_{part}"] = _without(base, [part], "ablate")
    for pair in spec.factorial:
        changes["_".join(f"without_{part}" for part in pair)] = _without(base, list(pair), "factorial")
        for part in pair:
            changes.setdefault(f"without_{part}", _without(base, [part], "factorial"))
    for name, change in spec.arms.items():
        if name == "base" or name in changes:
            raise InputError("there is such an arm already", where=f"arms.{name}", key=name)
        changes[name] = change
    return changes


_MODEL_PARTS: dict[str, object] = {
    "output_gate": False,
    "output_norm": False,
    "conv": 0,
    "mlp": False,
    "rope": False,
    "rope_dim": None,
    "q_rank": None,
    "kv_rank": None,
    "qk_norm": False,
    "token_shift": False,
    "mlp_shift": False,
    "bonus": False,
    "low_rank_activation": None,
    "first_norm": False,
    "canon": (),
    "beside": None,
    "attention_residuals": 0,
    "value_residual": None,
    "logit_cap": None,
    "experts": None,
}
"""Parts of the model that an arm can take away, with the value that takes each away."""


def _without(rule: Mapping[str, Any], parts: list[str], key: str) -> Change:
    """The change that takes parts of the rule or of the model away; `key` names the section in errors."""
    kind: Any = rule_plugin(rule["name"]).kind
    knobs, model = dict[str, Any](), dict[str, Any]()
    switches, parts_of_model = list[str](), list(_MODEL_PARTS)
    if issubclass(kind, OwnModule):
        arguments = kind.configured({name: value for name, value in rule.items() if name != "name"}).knobs()
        switches = [name for name, value in arguments.items() if value is True]
        parts_of_model = [name for name in _MODEL_PARTS if name not in OF_A_MIXER]
    for part in parts:
        if part in _MODEL_PARTS:
            model[part] = _MODEL_PARTS[part]
        elif part in switches:
            knobs[part] = False
        elif part in kind.options():
            knobs[part] = kind(**{part: kind.without(part)}).spec()[part]
        else:
            raise unknown("part", part, [*switches, *kind.options(), *parts_of_model], where=key)
    return Change(rule=knobs or None, model=model)
