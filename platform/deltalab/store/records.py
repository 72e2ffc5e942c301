"""What the store is given and what it answers: plain values, safe to send between processes."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from deltalab.store.models import RunState, Stage, TrialState


@dataclass(frozen=True)
class ArmRecord:
    """An arm as planned; `change` maps dotted keys to [base value, arm value]."""

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
    """One seed's outcome; `metrics` are (split, name, step, value), of which NaN and inf are not kept."""

    seed: int
    state: RunState = "done"
    diverged_at: int | None = None
    metrics: list[tuple[str, str, int, float]] = field(default_factory=list)
    artifacts: list[ArtifactRecord] = field(default_factory=list)


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial; times are Unix seconds, `state_size` counts elements."""

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
    """What is already known of a trial.

    finals: (split, metric) -> seed -> value at the last step, of the seeds that finished.
    """

    key: str
    state: TrialState
    error: str | None
    diverged: list[int]
    finals: dict[tuple[str, str], dict[int, float]]


@dataclass(frozen=True)
class TrialRow:
    """A trial as one arm of a study sees it; `runs` maps each seed to its state."""

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


class FinalMetric(NamedTuple):
    """A metric at the last step where the run has it."""

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
