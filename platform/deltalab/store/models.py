"""The ledger's tables: Study -> Arm -> Trial -> Run -> Metric; Training -> TrainingMetric; and Driver -> Stack."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, MetaData, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from deltalab.reading import pairs

StudyState = Literal["running", "done", "failed", "incomplete", "interrupted"]
"""incomplete: the machine or the disk failed several times under some trials, which the next run tries again."""
TrialState = Literal["done", "failed", "infeasible"]
"""infeasible: values that make no model, so that nothing ran."""
RunState = Literal["done", "diverged"]
Stage = Literal["tune", "confirm"]
TRANSIENT = frozenset({"driver", "stack"})
"""Tables about processes that run now: worth nothing in a copy of the ledger."""


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC that knows its zone. SQLite does not store the zone, so reading puts it back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return value and (value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC))


Id = Annotated[int, mapped_column(primary_key=True)]
Big = Annotated[int, mapped_column(BigInteger)]  # a seed or a size may be too large for PostgreSQL's INTEGER, 2^31


class Base(DeclarativeBase):
    # Name the constraints: a migration can only change one that has a name.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar = {
        dict[str, Any]: JSON,
        list[str]: JSON,
        datetime: UtcTime,
        StudyState: String,
        TrialState: String,
        RunState: String,
        Stage: String,
    }


class Study(Base):
    """One study under one profile, None for the default one. identity: the hash of all that it computes.

    tags, notes, hidden, deleted_at: what its readers write down; deleted_at hides a study everywhere until it is
    restored. total: the trials of the whole study, as its last driver counted them in the end; None before that.
    best: its best arm in a few words, kept when it ended (`deltalab.study.reports.best_arm`).
    """

    __tablename__ = "study"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(index=True)
    profile: Mapped[str | None]
    identity: Mapped[str] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    state: Mapped[StudyState]
    created_at: Mapped[datetime]
    finished_at: Mapped[datetime | None]
    provenance: Mapped[dict[str, Any]]
    tags: Mapped[list[str]] = mapped_column(default=list)
    notes: Mapped[str] = mapped_column(default="")
    hidden: Mapped[bool] = mapped_column(default=False)
    deleted_at: Mapped[datetime | None]
    total: Mapped[int | None]
    best: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))

    @property
    def address(self) -> str:
        """NAME:PROFILE, or NAME for the default profile: what commands take besides the id."""
        return f"{self.name}:{self.profile}" if self.profile else self.name

    @property
    def overrides(self) -> dict[str, Any]:
        """Settings given beside the study's file, by their keys; `spec` has them in place."""
        return dict(self.provenance.get("overrides", {}))

    @property
    def overridden(self) -> str:
        """`overrides` as words KEY=VALUE; "" where there are none."""
        return pairs(self.overrides)


class Arm(Base):
    """One variant in a study. change: dotted key -> [base value, arm value]. config: by task."""

    __tablename__ = "arm"
    __table_args__ = (UniqueConstraint("study_id", "name"),)

    id: Mapped[Id]
    study_id: Mapped[int] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"))
    name: Mapped[str]
    is_base: Mapped[bool]
    position: Mapped[int]
    change: Mapped[dict[str, Any]]
    config: Mapped[dict[str, Any]]


class RuleVersion(Base):
    """The source of a rule as it ran."""

    __tablename__ = "rule_version"
    __table_args__ = (UniqueConstraint("name", "hash"),)

    id: Mapped[Id]
    name: Mapped[str]
    hash: Mapped[str]
    source: Mapped[str]


class Trial(Base):
    """One configuration, trained once with all its seeds, however many arms and studies share it.

    error: the traceback of a failed trial, the reason of an infeasible one.
    """

    __tablename__ = "trial"

    id: Mapped[Id]
    key: Mapped[str] = mapped_column(unique=True)
    task: Mapped[str]
    task_version: Mapped[int]
    stage: Mapped[Stage]
    config: Mapped[dict[str, Any]]
    state: Mapped[TrialState]
    error: Mapped[str | None]
    started_at: Mapped[datetime]
    finished_at: Mapped[datetime]
    seconds: Mapped[float]
    parameters: Mapped[Big | None]
    state_size: Mapped[Big | None]
    tokens_per_second: Mapped[float | None]
    hardware: Mapped[dict[str, Any]]
    rule_version_id: Mapped[int] = mapped_column(ForeignKey("rule_version.id"), index=True)


class ArmTrial(Base):
    """A trial's number in an arm. The key has the number too, since tuning may draw the same trial twice."""

    __tablename__ = "arm_trial"

    arm_id: Mapped[int] = mapped_column(ForeignKey("arm.id", ondelete="CASCADE"), primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id", ondelete="CASCADE"), primary_key=True, index=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    values: Mapped[dict[str, Any]]


class Run(Base):
    """One seed of a trial."""

    __tablename__ = "run"
    __table_args__ = (UniqueConstraint("trial_id", "seed"),)

    id: Mapped[Id]
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id", ondelete="CASCADE"))
    seed: Mapped[Big]
    state: Mapped[RunState]
    diverged_at: Mapped[int | None]


class Metric(Base):
    """A finite value of a metric at a step of a run."""

    __tablename__ = "metric"
    __table_args__ = ({"sqlite_with_rowid": False},)  # store the key, most of the row, once and not twice

    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), primary_key=True)
    split: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]


class Artifact(Base):
    """A file that a run left behind."""

    __tablename__ = "artifact"

    id: Mapped[Id]
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), index=True)
    kind: Mapped[str]
    path: Mapped[str]
    sha256: Mapped[str]
    bytes: Mapped[Big]


class Training(Base):
    """A training of an exported folder, one run of `platform train`.

    run: its id. study, arm: what was exported, by address and name; a ledger may hold a training without its study.
    about: the run's `run.json`.
    """

    __tablename__ = "training"

    id: Mapped[Id]
    run: Mapped[str] = mapped_column(unique=True)
    name: Mapped[str]
    study: Mapped[str | None] = mapped_column(index=True)
    arm: Mapped[str | None]
    rule: Mapped[str]
    parameters: Mapped[Big | None]
    tokens_per_step: Mapped[Big]
    started_at: Mapped[datetime]
    about: Mapped[dict[str, Any]]


class TrainingMetric(Base):
    """A finite value of a metric at a step of a training. split: "evaluation" for what `platform eval` measured."""

    __tablename__ = "training_metric"
    __table_args__ = ({"sqlite_with_rowid": False},)

    training_id: Mapped[int] = mapped_column(ForeignKey("training.id", ondelete="CASCADE"), primary_key=True)
    split: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]


class Driver(Base):
    """A process that runs a study.

    holds: whether it decides what runs; else it joined, and takes stacks from the queue.
    machine: the system and the space of process ids in which `pid` means this process. started: when, in that system's
    terms; it tells the process from a later one with its number. runs: the folder of weights. places: stacks at a time.
    beat: a counter that grows as long as the process lives. beat_at: when it last grew, in Unix seconds of the
    database's clock, in order to show how old it is; nothing is decided by it.
    completed, total: the study's trials, as its holder counts them. progress: what the driver does now, as its last
    heartbeat wrote it (`deltalab.store.progress`).
    """

    __tablename__ = "driver"

    id: Mapped[str] = mapped_column(primary_key=True)
    study_id: Mapped[int] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"), index=True)
    holds: Mapped[bool]
    host: Mapped[str]
    machine: Mapped[str]
    pid: Mapped[int]
    started: Mapped[str]
    runs: Mapped[str]
    places: Mapped[int]
    beat: Mapped[Big]
    beat_at: Mapped[float]
    completed: Mapped[int]
    total: Mapped[int]
    progress: Mapped[dict[str, Any]] = mapped_column(default=dict)

    @property
    def where(self) -> str:
        return f"on {self.host}, process {self.pid}"


class Stack(Base):
    """A stack of trials in a study's queue, which a joined driver may take. driver_id: who took it.

    jobs: as JSON. step: the step that its training has reached. records: the trials' records as JSON, once they have
    ended. lost: why no worker could train them to the end, as JSON.
    """

    __tablename__ = "stack"

    id: Mapped[Id]
    study_id: Mapped[int] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"), index=True)
    jobs: Mapped[str]
    driver_id: Mapped[str | None] = mapped_column(ForeignKey("driver.id", ondelete="SET NULL"), index=True)
    step: Mapped[int]
    records: Mapped[str | None]
    lost: Mapped[str | None]
