"""Every setting of a method, spelled out: rule, model and train, addressed by paths such as `train.lr`."""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_rule
from deltalab.study.specs.study_file import Change, Method
from deltalab.tasks import Task
from deltalab.training.train import TrainSpec

MOST_TOKENS = 2**26
"""The most tokens of a batch: inputs and targets of so many take 1 GiB."""

OF_THE_TASK = ("vocab_size", "readout")
"""Settings of the model that the task determines."""


def rule_of(given: str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        return {"name": given}
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise InputError(f"rule must be a name, or a mapping with a name, not {given!r}")
    return dict(given)


def applied(base: Method, change: Change) -> Method:
    rule = rule_of(base.rule)
    if isinstance(change.rule, str):
        rule = {"name": change.rule}
    elif change.rule is not None:
        other = change.rule.get("name", rule["name"]) != rule["name"]
        rule = dict(change.rule) if other else {**rule, **change.rule}
    return Method(rule=rule, model={**base.model, **change.model}, train={**base.train, **change.train})


def resolve_method(method: Method, task: Task, *, where: str) -> dict[str, Any]:
    """Every setting of a method. Raises `InputError` naming the arm and the key."""
    try:
        if "rule" in method.model:
            raise InputError("model.rule stands one level up, beside model and train")
        for key in OF_THE_TASK:
            if key in method.model:
                raise InputError(f"model.{key} is set by task '{task.name}': leave it out")
        return resolve({"rule": rule_of(method.rule), "model": method.model, "train": method.train}, task)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def resolve(config: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """Every setting spelled out, so that equal means equal. Raises `InputError` for settings that make no model."""
    rule = resolve_rule(config["rule"])
    of_the_task = {key: getattr(task, key) for key in OF_THE_TASK}
    model = ModelSpec.of({**config["model"], "rule": rule, **of_the_task})
    train = TrainSpec(**_known(config["train"], TrainSpec, "train"))
    if (tokens := train.batch_size * task.length) > MOST_TOKENS:
        raise InputError(
            f"train.batch_size {train.batch_size:,} x {task.length:,} tokens of task '{task.name}' make a batch of "
            f"{tokens:,} tokens; a batch has at most {MOST_TOKENS:,}"
        )
    settings = {f.name: getattr(model, f.name) for f in fields(model) if f.name != "rule"}
    return json.loads(json.dumps({"rule": rule, "model": settings, "train": asdict(train)}))  # type: ignore[no-any-return]


def resolve_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule with every knob spelled out. Raises `InputError` for a rule or knobs that do not exist."""
    return get_rule(rule["name"], **{key: value for key, value in rule.items() if key != "name"}).spec()


def _known(given: dict[str, Any], kind: type, what: str) -> dict[str, Any]:
    names = [f.name for f in fields(kind)]
    for key in given:
        if key not in names:
            raise unknown(f"{what} key", key, names)
    for key in ("steps", "batch_size", "lr"):
        if key not in given:
            raise InputError(f"{what}: needs {key}")
    return given


def setting(config: Mapping[str, Any], path: str, where: str) -> Any:
    here: Any = config
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            raise unknown("setting", path, _paths(config), where=where)
        here = here[part]
    return here


_FIXED = ("rule.name", *(f"model.{key}" for key in OF_THE_TASK))


def with_values(
    config: Mapping[str, Any], values: Mapping[str, Any], *, where: str, absent: Collection[str] = ()
) -> dict[str, Any]:
    """The configuration with values put in by their paths, a whole rule first; not yet resolved.

    absent: knobs of the rule that it takes at its own defaults, by their paths, unless `values` give a rule that sets
    them. Raises `InputError` for settings that do not exist, or that the rule tried with them does not have.
    """
    changed: dict[str, Any] = json.loads(json.dumps(config))
    given = rule_of(values.get("rule", changed["rule"]))
    try:
        plain = resolve_rule({"name": given["name"]})
        spelled = resolve_rule(given)
    except InputError as error:
        raise InputError(f"{where}.rule: {error}") from None
    if "rule" not in values:
        # Knobs at their defaults are left out, since a rule may refuse one that has no effect beside the new values.
        given = {k: v for k, v in given.items() if k == "name" or (v != plain[k] and f"rule.{k}" not in absent)}
    changed["rule"] = given
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
        if isinstance(here, dict) and last in known and parents and path not in _FIXED:
            here[last] = value
        elif "rule" in values and parents[:1] == ["rule"]:
            knob = path.removeprefix("rule.")
            raise InputError(
                f"{where}.{path} cannot be searched beside {where}.rule: rule '{given['name']}', one of its "
                f"choices, has no '{knob}'. Give it in the choices that have it, {{name: RULE, {knob}: VALUE}}, or add "
                f"when: {{rule: [RULE, ...]}}"
            )
        else:
            raise unknown("setting", path, _paths(config), where=where)
    return changed


def _paths(config: Mapping[str, Any], under: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        found += _paths(value, f"{under}{key}.") if isinstance(value, dict) else [f"{under}{key}"]
    return [path for path in found if path not in _FIXED]
