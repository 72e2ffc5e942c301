"""Records: the values that the store takes and returns. A record can be sent from one process to another."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from deltalab.store.models import RunState, Stage, TrialState


@dataclass(frozen=True)
class ArmRecord:
    """An arm of a planned study.

    Attributes:
        is_base: Whether the arm is the base of the study.
        change: The settings in which the arm differs from the base: dotted key -> [base value, arm value].
        config: task -> the settings of the arm on this task.
    """

    name: str
    is_base: bool
    change: dict[str, Any]
    config: dict[str, Any]


@dataclass(frozen=True)
class RuleRecord:
    """The source of a rule, with the hash of the source."""

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
    """The outcome of a run, which is one seed of a trial.

    Attributes:
        state: "done" or "diverged".
        diverged_at: The step at which the run diverged; None if it did not.
        metrics: Tuples (split, name, step, value). The store leaves out values that are not finite.
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
        config: The settings of the trial.
        state: "done", "failed" or "infeasible".
        started_at: When the trial started, in Unix seconds.
        finished_at: When the trial ended, in Unix seconds.
        seconds: The trial's share of the training time of its stack, the group of trials that train together.
        rule: The rule, with the source that ran.
        error: The traceback of a failed trial, or the reason of an infeasible one.
        parameters: The number of parameters of the model.
        state_size: The number of elements of the model's state, KV caches too. A trial of a release that did not record
            the cost `conv_cache` counts the inputs of its convolution as well.
        tokens_per_second: The speed of training.
        hardware: The hardware on which the trial ran.
        runs: The outcome of each seed.
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
    """The outcome of a trial that the ledger already holds.

    Attributes:
        key: The trial's key.
        state: "done", "failed" or "infeasible".
        error: The traceback of a failed trial, or the reason of an infeasible one.
        diverged: The seeds that diverged.
        finals: (split, metric) -> seed -> value at the last step. Seeds that diverged are left out.
        parameters: The number of parameters of the model.
        seconds: The trial's share of the training time of its stack, the group of trials that train together.
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

    Attributes that are not described here mean the same as in `TrialRecord`.

    Attributes:
        number: The trial's number in the arm.
        values: The values that tuning or a search gave the trial.
        rule_hash: The hash of the rule's source.
        runs: seed -> the state of its run.
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
    """A trial with its number in an arm.

    A failed trial that ran again has the same key and a later `finished_at`.
    """

    arm: str
    number: int
    key: str
    finished_at: datetime


class FinalMetric(NamedTuple):
    """The last value of a metric in a run, with the step at which the run measured it."""

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
    """A point of the learning curve of one seed of a trial."""

    arm: str
    trial: str
    stage: Stage
    seed: int
    step: int
    value: float
