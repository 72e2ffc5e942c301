"""What the store takes and returns: plain values, which may be sent between processes."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from deltalab.store.models import RunState, Stage, TrialState


@dataclass(frozen=True)
class ArmRecord:
    """An arm as planned. change: dotted key -> [base value, arm value]. config: by task."""

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
    """The outcome of one seed. metrics: (split, name, step, value); values that are not finite are not stored."""

    seed: int
    state: RunState = "done"
    diverged_at: int | None = None
    metrics: list[tuple[str, str, int, float]] = field(default_factory=list)
    artifacts: list[ArtifactRecord] = field(default_factory=list)


@dataclass(frozen=True)
class TrialRecord:
    """A trial that has ended.

    started_at, finished_at: Unix seconds. seconds: its share of the training time. state_size: elements.
    error: the traceback of a failed trial, the reason of an infeasible one.
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
    """What the ledger already has of a trial.

    finals: (split, metric) -> seed -> value at the last step, of the seeds that finished. seconds: as in `TrialRecord`.
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
    """A trial in one arm of a study. runs: seed -> state."""

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
    """A trial's number in an arm. A failed trial that ran again has its key, and finished later."""

    arm: str
    number: int
    key: str
    finished_at: datetime


class FinalMetric(NamedTuple):
    """A metric at the last step at which the run has it."""

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
    """One point of one seed's learning curve."""

    arm: str
    trial: str
    stage: Stage
    seed: int
    step: int
    value: float
