"""The values that the store takes and returns. They may be sent between processes."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from deltalab.store.models import RunState, Stage, TrialState


@dataclass(frozen=True)
class ArmRecord:
    """An arm as planned.

    Attributes:
        is_base: Whether it is the base of the study.
        change: What it changes in the base: dotted key -> [base value, arm value].
        config: Its settings, by task.
    """

    name: str
    is_base: bool
    change: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class RuleRecord:
    """A rule's source and its hash."""

    name: str
    hash: str
    source: str


@dataclass(frozen=True)
class ArtifactRecord:
    """A file that a run wrote."""

    kind: str
    path: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class RunRecord:
    """The outcome of one seed.

    Attributes:
        state: "done" or "diverged".
        diverged_at: The step at which the run diverged; None if it did not.
        metrics: Values as (split, name, step, value). Values that are not finite are not stored.
        artifacts: The files that the run wrote.
    """

    seed: int
    state: RunState = "done"
    diverged_at: int | None = None
    metrics: list[tuple[str, str, int, float]] = field(default_factory=list)
    artifacts: list[ArtifactRecord] = field(default_factory=list)


@dataclass(frozen=True)
class TrialRecord:
    """A trial that has ended.

    Attributes:
        key: The hash of all that the trial computes.
        task_version: The version of the task.
        stage: "tune" or "confirm".
        config: The settings.
        state: "done", "failed" or "infeasible".
        started_at: The start, in Unix seconds.
        finished_at: The end, in Unix seconds.
        seconds: The trial's share of the training time of its stack.
        rule: The rule as it ran.
        error: The traceback of a failed trial, or the reason of an infeasible one.
        parameters: The number of parameters of the model.
        state_size: The number of elements of the model's state.
        tokens_per_second: The speed of training.
        hardware: What the trial ran on.
        runs: The outcomes of the seeds.
    """

    key: str
    task: str
    task_version: int
    stage: Stage
    config: dict[str, Any]
    state: TrialState
    started_at: float
    finished_at: float
    seconds: float
    rule: RuleRecord
    error: str | None = None
    parameters: int | None = None
    state_size: int | None = None
    tokens_per_second: float | None = None
    hardware: dict[str, Any] = field(default_factory=dict)
    runs: list[RunRecord] = field(default_factory=list)


@dataclass(frozen=True)
class TrialSummary:
    """What the ledger already holds of a trial.

    Attributes:
        key: The trial's key.
        state: "done", "failed" or "infeasible".
        error: The traceback of a failed trial, or the reason of an infeasible one.
        diverged: The seeds that diverged.
        finals: For the seeds that finished: (split, metric) -> seed -> value at the last step.
        parameters: The number of parameters of the model.
        seconds: The trial's share of the training time of its stack.
    """

    key: str
    state: TrialState
    error: str | None
    diverged: list[int]
    finals: dict[tuple[str, str], dict[int, float]]
    parameters: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class TrialRow:
    """A trial in one arm of a study.

    The attributes are those of `TrialRecord`, and the following.

    Attributes:
        number: The trial's number in the arm.
        values: The values that tuning or a search gave it.
        rule_hash: The hash of the rule's source.
        runs: seed -> state.
    """

    arm: str
    number: int
    values: dict[str, Any]
    key: str
    task: str
    task_version: int
    stage: Stage
    state: TrialState
    error: str | None
    config: dict[str, Any]
    rule: str
    rule_hash: str
    started_at: datetime
    finished_at: datetime
    seconds: float
    parameters: int | None
    state_size: int | None
    tokens_per_second: float | None
    hardware: dict[str, Any]
    runs: dict[int, RunState]


class Placed(NamedTuple):
    """A trial's number in an arm.

    A failed trial that ran again has the same key and a later `finished_at`.
    """

    arm: str
    number: int
    key: str
    finished_at: datetime


class FinalMetric(NamedTuple):
    """A metric of a run at the last step at which the run has it."""

    arm: str
    task: str
    stage: Stage
    trial: str
    seed: int
    run_state: RunState
    split: str
    metric: str
    step: int
    value: float


class CurvePoint(NamedTuple):
    """One point of the learning curve of one seed."""

    arm: str
    trial: str
    stage: Stage
    seed: int
    step: int
    value: float
