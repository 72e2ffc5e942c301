"""Every setting of a method, spelled out: rule, model and train, addressed by paths such as `train.lr`."""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.costs import CostCounter, training_flops
from deltalab.models.hybrids import with_hybrid
from deltalab.models.published import written_out
from deltalab.models.spec import ModelSpec
from deltalab.own_module import is_path
from deltalab.registry import get_rule
from deltalab.study.specs.setting_paths import FIXED, OF_THE_TASK, settable
from deltalab.study.specs.study_file import Change, Method
from deltalab.tasks import Task
from deltalab.training.spec import MOST, TrainSpec

MOST_TOKENS = 2**26
"""The most tokens of a batch, whose inputs and targets take 1 GiB."""

ABSENT = object()
"""What no knob is."""

FLOPS = "flops"
"""The key of `train` that gives operations in place of steps."""


def rule_of(rule: str | Mapping[str, Any]) -> dict[str, Any]:
    """Writes a rule as a mapping with its `name` and the knobs that are given."""
    if isinstance(rule, str):
        return {"name": rule}
    if not isinstance(rule, Mapping) or not isinstance(rule.get("name"), str):
        raise InputError(f"rule must be a name, or a mapping with a name, not {rule!r}")
    return dict(rule)


def with_change(base: Method, change: Change) -> Method:
    """Applies an arm's change to the base."""
    rule, below = written_out(rule_of(base.rule), with_hybrid(base.model))
    model = with_hybrid(change.model, base.model)
    other, above = (None, model) if change.rule is None else written_out(change.rule, model)
    if isinstance(change.rule, str):
        rule = other or {}
    elif other is not None:
        rule = other if other.get("name", rule["name"]) != rule["name"] else {**rule, **other}
    return Method(rule=rule, model={**below, **above}, train={**base.train, **change.train})


def resolve_method(method: Method, task: Task, counter: CostCounter | None = None, *, where: str) -> dict[str, Any]:
    """Spells out every setting of a method.

    Args:
        method: The rule, the model and the training as the study's file states them.
        task: The task, which sets `vocab_size`, `readout` and `patches` of the model.
        counter: As in `resolve`.
        where: The arm, which errors name.

    Raises:
        InputError: A setting does not exist or makes no model.
    """
    try:
        if "rule" in method.model:
            raise InputError("model.rule stands one level up, beside model and train", key="model.rule")
        for key in OF_THE_TASK:
            if key in method.model:
                raise InputError(f"model.{key} is set by task '{task.name}': leave it out", key=f"model.{key}")
        return resolve({"rule": rule_of(method.rule), "model": method.model, "train": method.train}, task, counter)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def resolve(config: Mapping[str, Any], task: Task, counter: CostCounter | None = None) -> dict[str, Any]:
    """Spells out every setting of a configuration, so that two equal models or trainings have equal configurations.

    `train.flops` becomes `train.steps`: the most whole steps that take no more operations.

    Args:
        config: The rule, the model and the training.
        task: The task, which sets `vocab_size`, `readout` and `patches` of the model.
        counter: Counts the model where `train.flops` gives the steps, and remembers it; None for a new one.

    Raises:
        InputError: The settings make no model or no training, or `train.flops` cannot be counted in steps.
    """
    given, layer = written_out(config["rule"], config["model"])
    rule = resolve_rule(given)
    of_the_task = {key: getattr(task, key) for key in OF_THE_TASK}
    model = ModelSpec.of({**layer, "rule": rule, **of_the_task})
    given_train = {key: value for key, value in config["train"].items() if key != FLOPS}
    flops = config["train"].get(FLOPS)
    train = TrainSpec(**_known(given_train | ({"steps": MOST["steps"]} if flops is not None else {})))
    if (tokens := train.batch_size * task.length) > MOST_TOKENS:
        raise InputError(
            f"train.batch_size {train.batch_size:,} x {task.length:,} tokens of task '{task.name}' make a batch of "
            f"{tokens:,} tokens; a batch has at most {MOST_TOKENS:,}"
        )
    if flops is not None:
        train = replace(train, steps=_steps_within(flops, train.batch_size, model, task, counter or CostCounter()))
    settings = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "rule"}
    return json.loads(json.dumps({"rule": rule, "model": settings, "train": asdict(train)}))  # type: ignore[no-any-return]


def within_flops(config: Mapping[str, Any], flops: float) -> dict[str, Any]:
    """Returns a configuration, not yet resolved, that trains for operations in place of its steps."""
    train = {key: value for key, value in config["train"].items() if key != "steps"}
    return {**config, "train": {**train, FLOPS: flops}}


def _steps_within(flops: object, batch_size: int, model: ModelSpec, task: Task, counter: CostCounter) -> int:
    """Returns the most steps whose operations do not exceed `flops`."""
    if isinstance(flops, bool) or not isinstance(flops, int | float) or not 0 < flops < math.inf:
        raise InputError(f"train.{FLOPS} must be a number above 0, not {flops!r}", key=f"train.{FLOPS}")
    try:
        per_token = counter.whole_flops_per_token(model, task.length)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"train.{FLOPS}: the operations of rule '{model.make_rule().name}' cannot be counted on a CPU, so give "
            f"train.steps: {type(error).__name__}: {reason}"
        ) from error
    step = batch_size * training_flops(model, per_token, task.length, task.most_scored)
    steps = int(flops // step)
    if not 1 <= steps <= MOST["steps"]:
        has = f"at most {MOST['steps']:,} steps" if steps else "at least one step"
        raise InputError(f"train.{FLOPS} {flops:g}: a step takes {step:.4g}, and a training has {has}")
    return steps


def resolve_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Spells out every knob of a rule. Raises `InputError` for a rule or a knob that does not exist."""
    return get_rule(rule["name"], **{key: value for key, value in rule.items() if key != "name"}).spec()


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings of a training; raises `InputError` if one does not exist or a required one is missing."""
    names = [f.name for f in fields(TrainSpec)]
    for key in settings:
        if key not in names:
            raise unknown("train key", key, [*names, FLOPS])
    for key in ("steps", "batch_size", "lr"):
        if key not in settings:
            raise InputError(f"needs {key}" + (f" or {FLOPS}" if key == "steps" else ""), where="train", key=key)
    return settings


def with_values(
    config: Mapping[str, Any], values: Mapping[str, Any], *, where: str, absent: Collection[str] = ()
) -> dict[str, Any]:
    """Puts values into a configuration by their paths, a whole rule first. The result is not yet resolved.

    Args:
        config: A configuration with every setting spelled out.
        values: The values by path.
        where: The section that searches the values, which errors name.
        absent: Paths of knobs that the rule takes at its own defaults, unless `values` have a rule that sets them.

    Raises:
        InputError: A setting does not exist, or the rule among the values does not have it.
    """
    changed: dict[str, Any] = json.loads(json.dumps(config))
    rule = rule_of(values.get("rule", changed["rule"]))
    if "@" in rule["name"]:
        raise InputError(
            f"{where}.rule: '{rule['name']}' sets the layer too, and a search keeps the base's: make it an arm, "
            "or the base"
        )
    try:
        spelled = resolve_rule(rule)
        # A module of another author may need arguments.
        plain = {} if is_path(rule["name"]) else resolve_rule({"name": rule["name"]})
    except InputError as error:
        raise InputError(f"{where}.rule: {error}") from None
    if "rule" not in values:
        # Knobs at their defaults are left out: a rule may refuse a knob that has no effect beside the new values.
        rule = {
            k: v for k, v in rule.items() if k == "name" or (v != plain.get(k, ABSENT) and f"rule.{k}" not in absent)
        }
    changed["rule"] = rule
    for path, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        if path == "rule":
            continue
        *parents, last = path.split(".")
        if len(parents) > 1 and parents[0] == "rule":
            changed["rule"] = resolve_rule(changed["rule"])  # Spell out the gate whose options follow.
        here: Any = changed
        for part in parents:
            here = here.get(part) if isinstance(here, dict) else None
        known = spelled if parents == ["rule"] else here
        if isinstance(here, dict) and last in known and parents and path not in FIXED:
            here[last] = value
        elif "rule" in values and parents[:1] == ["rule"]:
            knob = path.removeprefix("rule.")
            raise InputError(
                f"{where}.{path} cannot be searched beside {where}.rule: rule '{rule['name']}', one of its "
                f"choices, has no '{knob}'. Give it in the choices that have it, {{name: RULE, {knob}: VALUE}}, or add "
                f"when: {{rule: [RULE, ...]}}"
            )
        else:
            raise unknown("setting", path, settable(config), where=where)
    return changed
