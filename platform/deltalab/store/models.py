"""The ledger's tables: Study -> Arm -> Trial -> Run -> Metric; Training -> metrics and comparisons; Driver -> Stack."""

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Literal

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, MetaData, String, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from deltalab.reading import pairs

StudyState = Literal["running", "done", "failed", "incomplete", "interrupted"]
"""The state of a study. "incomplete": the machine or the disk failed several times under some trials, which the next
run tries again."""
TrialState = Literal["done", "failed", "infeasible"]
"""The state of a trial. "infeasible": its values make no model, so that nothing ran."""
RunState = Literal["done", "diverged"]
Stage = Literal["tune", "confirm"]
TRANSIENT = frozenset({"driver", "stack"})
"""Tables about processes that run now, which a copy of the ledger leaves out."""


class UtcTime(TypeDecorator[datetime]):
    """A time in UTC that knows its zone. SQLite does not store the zone, so reading puts it back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Returns the time as the database stores it."""
        return value and value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Returns a stored time with its zone."""
        return value and (value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC))


Id = Annotated[int, mapped_column(primary_key=True)]
Big = Annotated[int, mapped_column(BigInteger)]  # a seed or a size may be too large for PostgreSQL's INTEGER, 2^31


class Base(DeclarativeBase):
    """The base class of all tables."""

    # A migration can only change a constraint that has a name.
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
        list[dict[str, Any]]: JSON,
        datetime: UtcTime,
        StudyState: String,
        TrialState: String,
        RunState: String,
        Stage: String,
    }


class Study(Base):
    """One study under one profile.

    Attributes:
        profile: The name of its profile; None for the default profile.
        identity: The hash of all that it computes.
        spec: The study as resolved.
        created_at: When it was recorded first.
        finished_at: When it ended; None while it runs.
        provenance: What it ran with.
        tags: The tags that readers gave it.
        notes: The notes that readers wrote.
        hidden: Whether lists leave it out.
        deleted_at: When it was deleted; nothing shows it until it is restored.
        total: The trials of the whole study, as its last driver counted them in the end; None before that.
        best: Its best arm in a few words, kept when it ended (`deltalab.study.reports.best_arm`).
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
        """NAME:PROFILE, or NAME for the default profile. Commands take this address besides the id."""
        return f"{self.name}:{self.profile}" if self.profile else self.name

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings given beside the study's file, by their keys. `spec` has them in place."""
        return dict(self.provenance.get("overrides", {}))

    @property
    def overridden(self) -> str:
        """`overrides` as words KEY=VALUE; an empty string if there are none."""
        return pairs(self.overrides)


class Arm(Base):
    """One variant in a study.

    Attributes:
        study_id: Its study.
        is_base: Whether it is the base of the study.
        position: Its place in the plan.
        change: What it changes in the base: dotted key -> [base value, arm value].
        config: Its settings, by task.
    """

    __tablename__ = "arm"
    __table_args__ = (UniqueConstraint("study_id", "name"),)

    id: Mapped[Id]
    study_id: Mapped[int] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"))
    name: Mapped[str]
    is_base: Mapped[bool]
    position: Mapped[int]
    change: Mapped[dict[str, Any]]
    config: Mapped[dict[str, Any]]


class Importance(Base):
    """How much each searched setting explains of a metric's variance. It takes seconds to compute, so it is kept.

    Attributes:
        study_id: Its study, which is a search.
        metric: The metric, as the search names its objective.
        computed_from: The hash of the candidates, of their scores and of the method. If a study's differs, it is
            computed anew.
        shares: The settings with their shares, as `deltalab.study.answers.importance.Importance` has them.
    """

    __tablename__ = "importance"

    study_id: Mapped[int] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"), primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    computed_from: Mapped[str]
    shares: Mapped[list[dict[str, Any]]]


class Proposal(Base):
    """A rule that a loop proposed to `deltalab score`, and what became of it.

    Attributes:
        loop: The hash of what all proposals of the loop are compared with: base, task, seeds and tuning.
        number: How many rules the loop had proposed with this one.
        rule: The rule's name.
        source: The hash of the rule's file.
        asked_at: When the rule was proposed first.
        confirmation: Which confirmation of the loop it was given; None before that and without one. Its share of the
            loop's error is spent, whatever follows.
        answer: The answer as JSON; None while its trials run, or if they were interrupted.
    """

    __tablename__ = "proposal"
    __table_args__ = (UniqueConstraint("loop", "source"),)

    id: Mapped[Id]
    loop: Mapped[str]
    number: Mapped[int]
    rule: Mapped[str]
    source: Mapped[str]
    asked_at: Mapped[datetime]
    confirmation: Mapped[int | None]
    answer: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class SavedView(Base):
    """A view of the dashboard that a reader saved.

    Attributes:
        page: The name of the page.
        study_id: The study that the page shows; None if it shows none.
        parameters: The parameters of the page's address, without the study: name -> values.
    """

    __tablename__ = "saved_view"

    id: Mapped[Id]
    name: Mapped[str] = mapped_column(unique=True)
    page: Mapped[str]
    study_id: Mapped[int | None] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"))
    parameters: Mapped[dict[str, Any]]
    saved_at: Mapped[datetime]


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

    The attributes have the meanings of those of `TrialRecord`.
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
    """A trial's number in an arm. The number is part of the key, since tuning may draw the same trial twice."""

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
    __table_args__ = ({"sqlite_with_rowid": False},)  # stores the key, which is most of the row, once

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
    """A training of an exported folder, which is one run of `deltalab train`.

    A ledger may hold a training without its study.

    Attributes:
        name: The name of the run's folder.
        study: The address of the study that was exported.
        arm: The name of the arm that was exported.
        parameters: The number of parameters of the model.
        tokens_per_step: The tokens of a step.
        started_at: When the training started.
        about: The run's `run.json`.
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
    """A finite value of a metric at a step of a training. What `deltalab eval` measured has the split "evaluation".

    Standard errors of these values have the split "evaluation_stderr" and the names of the values.
    """

    __tablename__ = "training_metric"
    __table_args__ = ({"sqlite_with_rowid": False},)

    training_id: Mapped[int] = mapped_column(ForeignKey("training.id", ondelete="CASCADE"), primary_key=True)
    split: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    value: Mapped[float]


class TrainingComparison(Base):
    """The difference of a training's model to another one on a metric, item by item, as `deltalab eval` measured it.

    Attributes:
        name: The task and the metric, as the results have them.
        step: The step of the training's checkpoint.
        reference: The run of the other model or, if it has none, its folder or its name on the Hub.
        reference_step: The step of the other model's checkpoint; 0 if it is not known.
        is_log: Whether the logarithms of the values are compared.
        difference: The value of the training's model less that of the other one.
        low: The lower end of the 95% interval, which holds together with the others of the family.
        high: The upper end of the interval.
        p: The p-value of "no difference" in the whole family.
        items: The number of items.
        family: The number of differences whose intervals hold together.
    """

    __tablename__ = "training_comparison"

    training_id: Mapped[int] = mapped_column(ForeignKey("training.id", ondelete="CASCADE"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    reference: Mapped[str] = mapped_column(primary_key=True)
    reference_step: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    is_log: Mapped[bool]
    difference: Mapped[float]
    low: Mapped[float]
    high: Mapped[float]
    p: Mapped[float]
    items: Mapped[int]
    family: Mapped[int]


class Driver(Base):
    """A process that runs a study.

    Attributes:
        holds: Whether it decides what runs. A driver that does not hold the study joined it, and takes stacks from the
            queue.
        host: The name of the machine, for people.
        machine: The running system and its space of process ids, in which `pid` means this process.
        started: When the process began, in the system's own terms. A later process with the same number has another
            start.
        runs: The folder of weights.
        places: The stacks that it runs at a time.
        beat: A counter that grows as long as the process lives.
        beat_at: When the counter last grew, in Unix seconds of the database's clock. It shows the age of the heartbeat
            and decides nothing.
        completed: The study's trials that have ended, as its holder counts them.
        total: The study's trials in all, as its holder counts them.
        progress: What the driver does, as its last heartbeat wrote it (`deltalab.store.studies.driver_status`).
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
        """The machine and the process, as messages name them."""
        return f"on {self.host}, process {self.pid}"


class Stack(Base):
    """A stack of trials in a study's queue, which a driver that joined may take.

    Attributes:
        jobs: The jobs of the trials as JSON.
        driver_id: The driver that took the stack; None if it waits.
        step: The step that its training has reached.
        records: The trials' records as JSON, once they have ended.
        lost: Why no worker could train the stack to the end, as JSON.
    """

    __tablename__ = "stack"

    id: Mapped[Id]
    study_id: Mapped[int] = mapped_column(ForeignKey("study.id", ondelete="CASCADE"), index=True)
    jobs: Mapped[str]
    driver_id: Mapped[str | None] = mapped_column(ForeignKey("driver.id", ondelete="SET NULL"), index=True)
    step: Mapped[int]
    records: Mapped[str | None]
    lost: Mapped[str | None]
