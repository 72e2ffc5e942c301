"""Compares two studies or two arms: their computations, their settings, and the machines and versions they ran with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.store import Arm, Store, Study
from deltalab.study.planning.config_difference import difference
from deltalab.study.specs.recorded_study import recorded_tasks

OF_ARMS = ("base", "arms", "ablate", "factorial", "for_task")
"""Keys of a study that make its arms. The settings of the arms are compared instead, with every default."""
ELSEWHERE = ("name", "description", "task", *OF_ARMS)
"""Keys of a study that are not compared as settings: they name the study, or belong to its facts or arms."""
HASH = 12
"""How many letters of a hash are shown."""
EMPTY: tuple[Any, ...] = (None, {}, [], "")
"""Values that mean "not set". An older release did not record keys that later releases added."""


@dataclass(frozen=True)
class Side:
    """A study to compare: one in the ledger, or a file whose study need not have run.

    Attributes:
        label: The address of the study, or its file.
        identity: The hash of all that the study computes.
        facts: Profile, versions of tasks, sources of rules and version of our arithmetic, by dotted key; a key that is
            not known is left out.
        ran: The machine and the versions that the study ran with, by dotted key; None for a file.
        settings: The settings of the study outside its arms, by dotted key.
        arms: The settings of every arm on every task.
    """

    label: str
    identity: str
    facts: dict[str, Any]
    ran: dict[str, Any] | None
    settings: dict[str, Any]
    arms: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class SettingDiff:
    """A setting that differs.

    Attributes:
        key: The dotted key.
        left: The value on the left; None if it is not set.
        right: The value on the right; None if it is not set.
        where: The arms and tasks with the difference; () if all have it, or if the setting belongs to no arm.
    """

    key: str
    left: Any
    right: Any
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class StudyDiff:
    """The differences between two studies.

    Attributes:
        left: The label of the left study.
        right: The label of the right study.
        same: Whether both compute the same, so that they share all trials.
        identity: Differences in profile, versions of tasks, sources of rules and the version of our arithmetic.
        settings: Differences in the settings outside the arms.
        arms: Differences in the settings of the arms that both have, on the tasks that both have.
        only_left: The arms that only the left study has.
        only_right: The arms that only the right study has.
        ran: Differences in machine and versions; None if either study has not run.
    """

    left: str
    right: str
    same: bool
    identity: list[SettingDiff]
    settings: list[SettingDiff]
    arms: list[SettingDiff]
    only_left: list[str]
    only_right: list[str]
    ran: list[SettingDiff] | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the differences in the types of JSON."""
        return asdict(self)


def study_diff(left: Side, right: Side) -> StudyDiff:
    """Returns the differences between two studies."""
    return StudyDiff(
        left=left.label,
        right=right.label,
        same=left.identity == right.identity,
        identity=setting_diffs(left.facts, right.facts),
        settings=setting_diffs(left.settings, right.settings),
        arms=_of_arms(left.arms, right.arms),
        only_left=[arm for arm in left.arms if arm not in right.arms],
        only_right=[arm for arm in right.arms if arm not in left.arms],
        ran=None if left.ran is None or right.ran is None else setting_diffs(left.ran, right.ran),
    )


def arm_diff(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[SettingDiff]:
    """Returns the differences between two arms on the tasks that both have.

    Args:
        left: The settings of the left arm on every task.
        right: The settings of the right arm on every task.
    """
    return _of_arms({"arm": left}, {"arm": right})


def side_of_study(study: Study, arms: Sequence[Arm]) -> Side:
    """Returns a study in the ledger as a side of a comparison."""
    provenance = study.provenance
    tasks = {
        name: _task_facts(task.version, task.fingerprint, task.parameters)
        for name, task in recorded_tasks(study).items()
    }
    return Side(
        label=study.address,
        identity=study.identity,
        facts=_facts(study.profile, provenance.get("numerics"), provenance.get("rules", {}), tasks),
        ran=_flat({key: provenance.get(key) for key in ("hardware", "versions", "git", "unchecked")}),
        settings=_settings(study.spec),
        arms={arm.name: arm.config for arm in arms},
    )


def side_of_file(file: str | Path, profile: str | None = None) -> Side:
    """Returns the study of a file, as it would run on this machine, as a side of a comparison.

    Raises:
        InputError: The file is no valid study.
    """
    # These modules import torch, which the comparison of a study in the ledger does not need.
    from deltalab.registry import rule_plugin
    from deltalab.study.planning.make import make_plan
    from deltalab.study.specs.study_file import load_study
    from deltalab.training.train import NUMERICS

    plan = make_plan(load_study(file, profile=profile), profile=profile, study_file=str(file))
    tasks = {
        # JSON turns tuples into lists, as the ledger has them.
        name: _task_facts(task.version, task.fingerprint(), json.loads(json.dumps(asdict(task))))
        for name, task in plan.tasks.items()
    }
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


def find_side(address: str, store: Store | None) -> Side:
    """Finds a study by its address in the ledger, or by its file, FILE.yaml or FILE.yaml:PROFILE.

    Args:
        address: The address or the file.
        store: The ledger; None if there is none.

    Raises:
        InputError: There is no such study, or the file is no valid study.
    """
    file, colon, profile = address.rpartition(":")
    if address.endswith((".yaml", ".yml")):
        return side_of_file(address)
    if colon and file.endswith((".yaml", ".yml")):
        return side_of_file(file, profile)
    if store is None:
        raise InputError(f"{address}: there is no database here; give a study's file, or --db")
    study = store.study(address)
    return side_of_study(study, store.arms(study.id))


def arm_settings(side: Side, name: str) -> dict[str, Any]:
    """Returns the settings of an arm on every task.

    Raises:
        InputError: The study has no such arm.
    """
    if name not in side.arms:
        raise unknown("arm", name, side.arms, where=side.label)
    return side.arms[name]


def setting_diffs(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[SettingDiff]:
    """Returns the settings whose values differ: first those of `left` in order, then those that only `right` has."""
    keys = [*left, *(key for key in right if key not in left)]
    return [SettingDiff(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def _of_arms(left: Mapping[str, Mapping[str, Any]], right: Mapping[str, Mapping[str, Any]]) -> list[SettingDiff]:
    """The differences in the arms and tasks of both sides. A difference that several arms share is one entry."""
    places = [(arm, task) for arm in left if arm in right for task in left[arm] if task in right[arm]]
    cases_by_key: dict[str, list[tuple[Any, Any, str, str]]] = {}
    for arm, task in places:
        for key, (a, b) in difference(left[arm][task], right[arm][task]).items():
            cases_by_key.setdefault(key, []).append((a, b, arm, task))
    tasks, arms = {task for _, task in places}, {arm for arm, _ in places}
    rows = []
    for key, cases in cases_by_key.items():
        left_over = cases
        while left_over:
            a, b, *_ = left_over[0]
            same = [case for case in left_over if case[:2] == (a, b)]
            left_over = [case for case in left_over if case[:2] != (a, b)]
            rows.append(SettingDiff(key, a, b, tuple(_where(same, tasks, arms))))
    return rows


def _where(cases: Sequence[tuple[Any, Any, str, str]], tasks: set[str], arms: set[str]) -> Iterator[str]:
    """The arms and tasks of the cases in words; nothing if they are all arms on all tasks."""
    if len(cases) == len(tasks) * len(arms):
        return
    by_arm: dict[str, list[str]] = {}
    for _, _, arm, task in cases:
        by_arm.setdefault(arm, []).append(task)
    if all(len(arm_tasks) == len(tasks) for arm_tasks in by_arm.values()):
        yield from by_arm
    elif by_arm.keys() == arms and len({tuple(arm_tasks) for arm_tasks in by_arm.values()}) == 1:
        yield from (f"on {task}" for task in next(iter(by_arm.values())))
    else:
        yield from (f"{arm} on {', '.join(arm_tasks)}" for arm, arm_tasks in by_arm.items())


def _facts(
    profile: str | None, numerics: object, rules: Mapping[str, str], tasks: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The profile, arithmetic, rules and tasks of a study, by dotted key.

    An early release did not record `numerics`, the version of our arithmetic, which is then None.
    """
    hashes = {name: rule_hash[:HASH] for name, rule_hash in rules.items()}
    return _flat({"profile": profile, "numerics": numerics, "rule": hashes, "task": tasks})


def _task_facts(version: int | None, fingerprint: str | None, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a task. `fingerprint` is a hash of the task's data."""
    return {"version": version, "data": fingerprint, **parameters}


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a study outside its arms, by dotted key."""
    settings = {key: value for key, value in spec.items() if key not in ELSEWHERE}
    ranges = {task: {"tune": change.get("tune")} for task, change in (spec.get("for_task") or {}).items()}
    return _flat({**settings, "for_task": ranges})


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key, without those that are not set.

    Examples:
        >>> _flat({"tune": {"train.lr": {"choice": [1, 2]}, "trials": 3}, "search": None})
        {'tune.train.lr.choice': [1, 2], 'tune.trials': 3}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif value not in EMPTY:
            flat[f"{prefix}{key}"] = value
    return flat
