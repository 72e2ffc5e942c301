"""What differs between two studies, or between two arms: what they compute, their settings, and what they ran with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.store import Arm, Store, Study
from deltalab.study.planning.config_difference import difference

OF_ARMS = ("base", "arms", "ablate", "factorial", "for_task")
"""Keys of a study that make its arms. The arms' settings are compared in their place, with every default."""
ELSEWHERE = ("name", "description", "task", *OF_ARMS)
"""Keys of a study that are no setting, or that are compared in another place."""
HASH = 12
"""Letters of a hash that are shown."""
EMPTY: tuple[Any, ...] = (None, {}, [], "")
"""Values that mean "not given": an older release did not write down a key of a later one."""


@dataclass(frozen=True)
class Side:
    """What is compared: a study of the ledger, or one of a file that need not have run.

    label: its address or its file. identity: the hash of all that it computes. facts: what it computes besides its
    settings, and what it ran with, by dotted key; a key that is not known is left out. ran: whether the facts tell what
    it ran with. settings: those of the study, by dotted key. arms: the settings of every arm on every task.
    """

    label: str
    identity: str
    facts: dict[str, Any]
    ran: dict[str, Any] | None
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Changed:
    """A setting that differs. where: the arms and tasks in which it does; () for all, or for a setting of no arm."""

    key: str
    left: Any
    right: Any
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyDiff:
    """What differs between two studies.

    same: whether they compute the same, so that they share all trials. identity: profile, versions of tasks, sources of
    rules and the version of our arithmetic. settings: those of the study, outside its arms. arms: settings of the arms
    that both have, on the tasks that both have. only_left, only_right: arms that one of them has. ran: machine and
    versions; None where one has not run.
    """

    left: str
    right: str
    same: bool
    identity: list[Changed]
    settings: list[Changed]
    arms: list[Changed]
    only_left: list[str]
    only_right: list[str]
    ran: list[Changed] | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def study_diff(left: Side, right: Side) -> StudyDiff:
    """What differs between two studies."""
    return StudyDiff(
        left=left.label,
        right=right.label,
        same=left.identity == right.identity,
        identity=changed(left.facts, right.facts),
        settings=changed(left.settings, right.settings),
        arms=_of_arms(left.arms, right.arms),
        only_left=[arm for arm in left.arms if arm not in right.arms],
        only_right=[arm for arm in right.arms if arm not in left.arms],
        ran=None if left.ran is None or right.ran is None else changed(left.ran, right.ran),
    )


def arm_diff(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Changed]:
    """What differs between two arms, each given by its settings on every task; on the tasks that both have."""
    return _of_arms({"arm": left}, {"arm": right})


def of_ledger(study: Study, arms: Sequence[Arm]) -> Side:
    """A study as the ledger has it."""
    about = study.provenance
    return Side(
        label=study.address,
        identity=study.identity,
        facts=_facts(study.profile, about.get("numerics"), about.get("rules", {}), about["tasks"]),
        ran=_flat({key: about.get(key) for key in ("hardware", "versions", "git", "unchecked")}),
        settings=_settings(study.spec),
        arms={arm.name: arm.config for arm in arms},
    )


def of_file(file: str | Path, profile: str | None = None) -> Side:
    """The study of a file, as it would run here. Raises `InputError` for a file that is no valid study."""
    # These import torch, which a study of the ledger does not need.
    from deltalab.registry import rule_plugin
    from deltalab.study.planning.make import make_plan
    from deltalab.study.specs.study_file import load_study
    from deltalab.training.train import NUMERICS

    plan = make_plan(load_study(file, profile=profile), profile=profile, where=str(file))
    tasks = {
        name: {"version": task.version, "parameters": asdict(task), "fingerprint": task.fingerprint()}
        for name, task in plan.tasks.items()
    }
    tasks = json.loads(json.dumps(tasks))  # as the ledger has them: lists for tuples
    arms: dict[str, dict[str, Any]] = {}
    for arm in plan.arms:
        arms.setdefault(arm.name, {})[arm.task] = arm.config
    return Side(
        label=f"{file}:{profile}" if profile else str(file),
        identity=plan.identity,
        facts=_facts(profile, NUMERICS, {name: rule_plugin(name).hash for name in plan.rules}, tasks),
        ran=None,
        settings=_settings(plan.spec.model_dump(mode="json")),
        arms=arms,
    )


def side(address: str, store: Store | None) -> Side:
    """A study by its address in the ledger, or by its file, FILE.yaml or FILE.yaml:PROFILE.

    store: None where there is no ledger. Raises `InputError` where there is no such study.
    """
    file, colon, profile = address.rpartition(":")
    if address.endswith((".yaml", ".yml")):
        return of_file(address)
    if colon and file.endswith((".yaml", ".yml")):
        return of_file(file, profile)
    if store is None:
        raise InputError(f"{address}: there is no database here; give a study's file, or --db")
    study = store.study(address)
    return of_ledger(study, store.arms(study.id))


def the_arm(found: Side, name: str) -> dict[str, Any]:
    """The settings of an arm on every task. Raises `InputError` where the study has no such arm."""
    if name not in found.arms:
        raise unknown("arm", name, found.arms, where=found.label)
    return found.arms[name]


def changed(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Changed]:
    """The keys whose values differ, in their order in `left`, then those of `right` alone."""
    keys = [*left, *(key for key in right if key not in left)]
    return [Changed(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def _of_arms(left: Mapping[str, Mapping[str, Any]], right: Mapping[str, Mapping[str, Any]]) -> list[Changed]:
    """What differs in the arms and tasks that both have; a difference that several share stands there once."""
    places = [(arm, task) for arm in left if arm in right for task in left[arm] if task in right[arm]]
    found: dict[str, list[tuple[Any, Any, str, str]]] = {}
    for arm, task in places:
        for key, (a, b) in difference(left[arm][task], right[arm][task]).items():
            found.setdefault(key, []).append((a, b, arm, task))
    tasks, arms = {task for _, task in places}, {arm for arm, _ in places}
    rows = []
    for key, cases in found.items():
        left_over = cases
        while left_over:
            a, b, *_ = left_over[0]
            same = [case for case in left_over if case[:2] == (a, b)]
            left_over = [case for case in left_over if case[:2] != (a, b)]
            rows.append(Changed(key, a, b, tuple(_where(same, tasks, arms))))
    return rows


def _where(cases: Sequence[tuple[Any, Any, str, str]], tasks: set[str], arms: set[str]) -> Iterator[str]:
    """The arms and tasks of these cases in words; nothing for all arms on all tasks."""
    if len(cases) == len(tasks) * len(arms):
        return
    by_arm: dict[str, list[str]] = {}
    for _, _, arm, task in cases:
        by_arm.setdefault(arm, []).append(task)
    if all(len(own) == len(tasks) for own in by_arm.values()):
        yield from by_arm
    elif by_arm.keys() == arms and len({tuple(own) for own in by_arm.values()}) == 1:
        yield from (f"on {task}" for task in next(iter(by_arm.values())))
    else:
        yield from (f"{arm} on {', '.join(own)}" for arm, own in by_arm.items())


def _facts(
    profile: str | None, numerics: object, rules: Mapping[str, str], tasks: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """numerics: the version of our arithmetic; None where an earlier release did not record it."""
    told = {
        name: {
            "version": about.get("version"),
            "data": about.get("fingerprint"),
            **about.get("parameters", {}),
        }
        for name, about in tasks.items()
    }
    return {
        **_flat({"profile": profile, "numerics": numerics, "rule": {name: h[:HASH] for name, h in rules.items()}}),
        **_flat({"task": told}),
    }


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    return _flat({key: value for key, value in spec.items() if key not in ELSEWHERE})


def _flat(given: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Values by dotted key, without those that are not given.

    >>> _flat({"tune": {"train.lr": {"choice": [1, 2]}, "trials": 3}, "search": None})
    {'tune.train.lr.choice': [1, 2], 'tune.trials': 3}
    """
    found: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{under}{key}.")
        elif value not in EMPTY:
            found[f"{under}{key}"] = value
    return found


def written(value: Any) -> str:
    """A setting as one would write it down, numbers in full: two that differ look different.

    >>> written({"head": {"init": 0.02}}), written({"name": "comba", "d": {"const": {}}}), written(None)
    ('head(init=0.02)', 'comba(d=const)', 'absent')
    >>> written(0.1 + 0.2), written([1, "x"]), written(True)
    ('0.30000000000000004', '[1, x]', 'true')
    """
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    if not isinstance(value, Mapping):
        return str(value)
    if "name" in value:  # a rule with its knobs
        value = {value["name"]: {key: given for key, given in value.items() if key != "name"}}
    if len(value) == 1 and isinstance(given := next(iter(value.values())), Mapping):
        arguments = ", ".join(f"{key}={written(item)}" for key, item in given.items())
        return f"{next(iter(value))}({arguments})" if arguments else str(next(iter(value)))
    return f"{{{', '.join(f'{key}: {written(item)}' for key, item in value.items())}}}"
