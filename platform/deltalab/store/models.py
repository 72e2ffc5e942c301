"""The ledger's tables: Study -> Arm -> Trial -> Run -> Metric; and Training -> TrainingMetric."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, MetaData, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

StudyState = Literal["running", "done", "failed", "interrupted"]
TrialState = Literal["done", "failed", "infeasible"]
"""infeasible: values that make no model, so that nothing ran."""
RunState = Literal["done", "diverged"]
Stage = Literal["tune", "confirm"]


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
        datetime: UtcTime,
        StudyState: String,
        TrialState: String,
        RunState: String,
        Stage: String,
    }


class Study(Base):
    """One study under one profile, None for the default one. identity: the hash of all that it computes."""

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

    @property
    def address(self) -> str:
        """NAME:PROFILE, or NAME for the default profile: what commands take besides the id."""
        return f"{self.name}:{self.profile}" if self.profile else self.name


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
