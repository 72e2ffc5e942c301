"""Reads the ledger. Rows come out detached from the database, so that pages may keep them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, get_args

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Double,
    Engine,
    Integer,
    String,
    Subquery,
    bindparam,
    column,
    func,
    select,
    text,
    true,
)
from sqlalchemy.orm import Session

from deltalab.errors import InputError, unknown
from deltalab.reading import pairs
from deltalab.store import drivers
from deltalab.store.database import shown, told
from deltalab.store.models import (
    Arm,
    ArmTrial,
    Artifact,
    Metric,
    RuleVersion,
    Run,
    RunState,
    Stage,
    Study,
    Trial,
)
from deltalab.store.outage import PATIENCE_SECONDS, Patience, waited
from deltalab.store.records import CurvePoint, FinalMetric, Placed, TrialRow, TrialSummary

T = TypeVar("T")
TRIAL_COLUMNS = (
    "key", "task", "task_version", "stage", "state", "error", "config", "started_at", "finished_at", "seconds",
    "parameters", "state_size", "tokens_per_second", "hardware",
)  # fmt: skip
KEYS_AT_ONCE = 500  # databases limit how many values a statement may have

LAST_STEPS = """
WITH RECURSIVE
runs(id) AS ({runs}),
splits(run_id, split) AS (
    SELECT id, (SELECT max(split) FROM metric WHERE metric.run_id = runs.id) FROM runs
    UNION ALL
    SELECT run_id, (SELECT max(split) FROM metric WHERE metric.run_id = splits.run_id AND metric.split < splits.split)
    FROM splits WHERE split IS NOT NULL
),
names(run_id, split, name) AS (
    SELECT run_id, split,
        (SELECT max(name) FROM metric WHERE metric.run_id = splits.run_id AND metric.split = splits.split)
    FROM splits WHERE split IS NOT NULL
    UNION ALL
    SELECT run_id, split, (
        SELECT max(name) FROM metric
        WHERE metric.run_id = names.run_id AND metric.split = names.split AND metric.name < names.name
    )
    FROM names WHERE name IS NOT NULL
),
last(run_id, split, name, step) AS (
    SELECT run_id, split, name, (
        SELECT max(step) FROM metric
        WHERE metric.run_id = names.run_id AND metric.split = names.split AND metric.name = names.name
    )
    FROM names WHERE name IS NOT NULL
)
SELECT run_id, split, name, step, (
    SELECT value FROM metric
    WHERE metric.run_id = last.run_id AND metric.split = last.split AND metric.name = last.name
        AND metric.step = last.step
) AS value
FROM last
"""
DONE_RUNS = """
SELECT run.id FROM run JOIN trial ON trial.id = run.trial_id WHERE run.state = 'done' AND trial.key IN :keys
"""
RUNS_OF_STUDY = """
SELECT run.id FROM run WHERE run.trial_id IN (
    SELECT trial.id FROM trial
    JOIN arm_trial ON arm_trial.trial_id = trial.id
    JOIN arm ON arm.id = arm_trial.arm_id
    WHERE arm.study_id = :study AND trial.stage IN :stages{among}
)
"""
LAST_STEP_OF_ONE = """
WITH runs(id) AS ({runs})
SELECT metric.run_id, metric.split, metric.name, metric.step, metric.value FROM runs JOIN metric
ON metric.run_id = runs.id AND metric.split = :split AND metric.name = :name AND metric.step = (
    SELECT max(step) FROM metric AS other
    WHERE other.run_id = runs.id AND other.split = :split AND other.name = :name
)
"""


class Ledger:
    """The ledger, to be read. Every method waits for a database that is gone, and raises `InputError` at last."""

    def __init__(self, engine: Engine, patience: float = PATIENCE_SECONDS) -> None:
        self._engine = engine
        self.patience = Patience(patience)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._engine.url)})"

    def __getstate__(self) -> None:
        raise TypeError("the store stays in the driver's process; send records to it")

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with told(self._engine.url), Session(self._engine) as session:
            yield session

    def studies(self) -> list[Study]:
        """All studies that are not deleted, the latest first. One whose driver is gone is shown as "interrupted"."""
        return self._studies(true())

    def study(
        self, address: str | int, profile: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Study:
        """The study at an address: its id, NAME or NAME:PROFILE.

        NAME alone is the run of the default profile without overrides; where there is none, the latest run of any.
        profile: an alternative to writing NAME:PROFILE. overrides: those of the study, by their keys.
        Of several matches the latest is used.
        Raises `InputError` where there is no such study, or only a deleted one, and lists those that there are.
        """
        name, _, own = str(address).partition(":")
        if own and profile not in (None, own):
            raise InputError(f"study '{address}' names one profile, --profile '{profile}' another: give one of them")
        profile = profile or own or None
        named = [] if isinstance(address, int) else self._studies(Study.name == name)
        if not named and name.isdecimal() and len(name) < 10:  # databases take no larger integers as an id
            named = self._studies(Study.id == int(name))
        elif profile is None:
            named = [study for study in named if study.profile is None] or named
        asked = f"{named[0].name}:{profile}" if named and profile else address
        named = [study for study in named if profile in (None, study.profile)]
        if named and overrides:
            found = [study for study in named if study.overrides == overrides]
            if not found:
                known = [study.overridden or "no overrides" for study in named]
                raise unknown(f"run of study '{asked}' with", pairs(overrides), known, where=shown(self._engine.url))
            return found[0]
        for study in [*(study for study in named if not study.overrides), *named]:
            return study
        if gone := self._deleted(str(asked)):
            raise InputError(
                f"{shown(self._engine.url)}: study '{asked}' is deleted; `platform study restore {gone}` brings it back"
            )
        addresses = sorted({study.address for study in self.studies()})
        raise unknown("study", asked, addresses, where=shown(self._engine.url))

    @waited
    def _studies(self, chosen: ColumnElement[bool]) -> list[Study]:
        """The studies that are meant, the latest first."""
        with self._reading() as session:
            rows = select(Study).where(chosen, Study.deleted_at.is_(None))
            found = list(session.scalars(rows.order_by(Study.created_at.desc(), Study.id.desc())))
            drivers.shown(session, found)
            return found

    @waited
    def _deleted(self, address: str) -> int | None:
        """The id of the deleted study at an address."""
        with self._reading() as session:
            for study in session.scalars(select(Study).where(Study.deleted_at.is_not(None)).order_by(Study.id.desc())):
                if address in (str(study.id), study.name, study.address):
                    return study.id
        return None

    @waited
    def arms(self, study_id: int) -> list[Arm]:
        """A study's arms in the order of its plan."""
        with self._reading() as session:
            return list(session.scalars(select(Arm).where(Arm.study_id == study_id).order_by(Arm.position)))

    @waited
    def placed(self, study_id: int) -> list[Placed]:
        """What tells a reader of a study which of its trials are new; in the order of `trials`."""
        rows = (
            select(Arm.name, ArmTrial.number, Trial.key, Trial.finished_at)
            .join_from(Arm, ArmTrial)
            .join(Trial)
            .where(Arm.study_id == study_id)
            .order_by(Arm.position, Trial.stage, Trial.task, ArmTrial.number, Trial.id)
        )
        with self._reading() as session:
            return [Placed._make(row) for row in session.execute(rows).all()]

    @waited
    def mark(self, study_id: int) -> str:
        """A word that changes when a trial of the study is recorded, attached or forgotten, and with its state."""
        trials = (
            select(func.count(), func.max(Trial.finished_at), func.sum(ArmTrial.trial_id))
            .join_from(ArmTrial, Trial)
            .where(ArmTrial.arm_id.in_(select(Arm.id).where(Arm.study_id == study_id)))
        )
        with self._reading() as session:
            study = session.get_one(Study, study_id)
            drivers.shown(session, [study])
            return " ".join(map(str, (study.state, study.finished_at, *session.execute(trials).one())))

    @waited
    def trials(
        self, study_id: int, *, limit: int | None = None, offset: int = 0, trials: Iterable[str] | None = None
    ) -> list[TrialRow]:
        """A study's trials by arm, stage ("tune" last) and number; a shared trial appears in each of its arms.

        trials: the keys of the trials to read, in groups of which each has this order; None reads all.
        """
        keys = None if trials is None else list(trials)
        about = [getattr(Trial, name) for name in TRIAL_COLUMNS]  # whole Trial objects take twice as long
        rows = (
            select(Arm.name, ArmTrial.number, ArmTrial.values, RuleVersion.name, RuleVersion.hash, Trial.id, *about)
            .join_from(Arm, ArmTrial)
            .join(Trial)
            .join(RuleVersion)
            .where(Arm.study_id == study_id)
            .order_by(Arm.position, Trial.stage, Trial.task, ArmTrial.number, Trial.id)
            .limit(limit)
            .offset(offset)
        )
        groups = [rows] if keys is None else [rows.where(Trial.key.in_(group)) for group in _groups(keys)]
        with self._reading() as session:
            found = [row for group in groups for row in session.execute(group).all()]
            states: dict[int, dict[int, RunState]] = {}
            for ids in _groups(row[5] for row in found):
                runs = select(Run.trial_id, Run.seed, Run.state).where(Run.trial_id.in_(ids)).order_by(Run.seed)
                for trial_id, seed, state in session.execute(runs).all():
                    states.setdefault(trial_id, {})[seed] = state
        return [
            TrialRow(
                arm=arm,
                number=number,
                values=values,
                rule=rule,
                rule_hash=rule_hash,
                runs=states.get(trial_id, {}),
                **dict(zip(TRIAL_COLUMNS, about, strict=True)),
            )
            for arm, number, values, rule, rule_hash, trial_id, *about in found
        ]

    def known_trials(self, keys: Iterable[str]) -> dict[str, TrialSummary]:
        """Summaries of the trials among `keys` that any study has recorded, by key."""
        return self._known_trials(list(keys))

    @waited
    def _known_trials(self, keys: list[str]) -> dict[str, TrialSummary]:
        known: dict[str, TrialSummary] = {}
        with self._reading() as session:
            for group in _groups(keys):
                chosen = Trial.key.in_(group)
                for trial in session.scalars(select(Trial).where(chosen)):
                    known[trial.key] = TrialSummary(
                        trial.key, trial.state, trial.error, [], {}, trial.parameters, trial.seconds
                    )
                if known.keys().isdisjoint(group):
                    continue
                diverged = select(Trial.key, Run.seed).join(Run).where(chosen, Run.state == "diverged")
                for key, seed in session.execute(diverged.order_by(Run.seed)):
                    known[key].diverged.append(seed)
                last = _last_steps(DONE_RUNS, keys=group)
                finals = select(Trial.key, Run.seed, last.c.split, last.c.name, last.c.value)
                finals = finals.join_from(Trial, Run).join(last, last.c.run_id == Run.id)
                # PostgreSQL does not know how few runs `last` has, and would read all that there are.
                for key, seed, split, name, value in session.execute(finals.where(chosen).order_by(Run.seed)):
                    known[key].finals.setdefault((split, name), {})[seed] = value
        return known

    @waited
    def final_metrics(
        self,
        study_id: int,
        *,
        stage: Stage | None = None,
        metrics: Iterable[tuple[str, str]] | None = None,
        trials: Iterable[str] | None = None,
    ) -> list[FinalMetric]:
        """Each run's metrics at their last step; `run_state` tells diverged runs from finished ones.

        metrics: the pairs (split, metric) to read, which takes a fraction of the time; None reads all.
        trials: the keys of the trials to read; None reads all.
        """
        keys = None if trials is None else list(trials)
        found: dict[int, list[tuple[str, str, int, float]]] = {}
        with self._reading() as session:
            runs = _runs(session, study_id, stage, None, keys)
            for group in [None] if keys is None else _groups(keys):
                given: dict[str, int | Sequence[str]] = {"study": study_id, "stages": _stages(stage)}
                if group is not None:
                    given["keys"] = group
                query = RUNS_OF_STUDY.format(among="" if group is None else " AND trial.key IN :keys")
                for row in _last_values(session, query, metrics, given):
                    found.setdefault(row[0], []).append(tuple(row[1:]))
        return [
            FinalMetric(run.arm, run.task, run.stage, run.trial, run.seed, run.state, *last)
            for run in runs
            for last in sorted(found.get(run.id, ()))
        ]

    @waited
    def measured(self, study_id: int) -> list[tuple[Stage, str, str, str]]:
        """What a study measures: (stage, task, split, metric), by one trial of each arm on each task."""
        first = (
            select(func.max(Trial.id))
            .join_from(ArmTrial, Arm)
            .join(Trial)
            .where(Arm.study_id == study_id, Trial.state == "done")
            .group_by(Arm.id, Trial.stage, Trial.task)
        )
        rows = (
            select(Trial.stage, Trial.task, Metric.split, Metric.name)
            .join_from(Trial, Run)
            .join(Metric)
            .where(Trial.id.in_(first))
            .distinct()
        )
        with self._reading() as session:
            return sorted((stage, task, split, name) for stage, task, split, name in session.execute(rows))

    @waited
    def curves(
        self,
        study_id: int,
        task: str,
        metric: str,
        split: str,
        *,
        stage: Stage = "confirm",
        max_points: int = 2000,
        trials: Iterable[str] | None = None,
    ) -> list[CurvePoint]:
        """Learning curves of each arm and seed, thinned evenly to `max_points`; both ends are kept.

        Of n points, point i = 0..n-1 is kept where floor(i (m-1) / (n-1)) grows: exactly m = max_points.
        trials: the keys of the trials to read; None reads all.
        """
        if max_points < 2:
            raise ValueError("max_points is at least 2: the first and the last")
        keys = None if trials is None else list(trials)
        with self._reading() as session:
            runs = _runs(session, study_id, stage, task, keys)
            points = _points(session, [run.id for run in runs], metric, split, max_points)
        return [
            CurvePoint(run.arm, run.trial, run.stage, run.seed, step, value)
            for run in runs
            for step, value in points.get(run.id, ())
        ]

    @waited
    def rule_versions(self, study_id: int) -> list[RuleVersion]:
        """The rules as this study ran them."""
        used = select(Trial.rule_version_id).join(ArmTrial).join(Arm).where(Arm.study_id == study_id)
        rows = select(RuleVersion).where(RuleVersion.id.in_(used)).order_by(RuleVersion.name, RuleVersion.id)
        with self._reading() as session:
            return list(session.scalars(rows))

    @waited
    def artifacts(self, study_id: int, arm: str) -> list[tuple[Trial, Run, Artifact]]:
        """The files of an arm's runs, confirmed trials first."""
        held = select(ArmTrial.trial_id).join(Arm).where(Arm.study_id == study_id, Arm.name == arm)
        rows = (
            select(Trial, Run, Artifact)
            .join_from(Trial, Run)
            .join(Artifact)
            .where(Trial.id.in_(held))
            .order_by(Trial.stage, Trial.id, Run.seed, Artifact.kind, Artifact.path)
        )
        with self._reading() as session:
            return [(trial, run, artifact) for trial, run, artifact in session.execute(rows)]


def _groups(values: Iterable[T]) -> Iterator[list[T]]:
    distinct = list(dict.fromkeys(values))
    for start in range(0, len(distinct), KEYS_AT_ONCE):
        yield distinct[start : start + KEYS_AT_ONCE]


class _Run(NamedTuple):
    """A run of one arm of a study."""

    arm: str
    task: str
    stage: Stage
    trial: str
    seed: int
    state: RunState
    id: int


def _stages(stage: Stage | None) -> Sequence[Stage]:
    return [stage] if stage else get_args(Stage)


def _runs(
    session: Session, study_id: int, stage: Stage | None, task: str | None, keys: Sequence[str] | None
) -> list[_Run]:
    """The runs of a study by arm, task, key and seed. A join in SQL with their metrics takes ten times as long.

    An arm that has a trial under two numbers has its runs once.
    """
    rows = (
        select(Arm.name, Trial.task, Trial.stage, Trial.key, Run.seed, Run.state, Run.id, Arm.position)
        .join_from(Arm, ArmTrial)
        .join(Trial)
        .join(Run)
        .where(Arm.study_id == study_id, Trial.stage.in_(_stages(stage)))
        .distinct()
    )
    if task is not None:
        rows = rows.where(Trial.task == task)
    groups = [rows] if keys is None else [rows.where(Trial.key.in_(group)) for group in _groups(keys)]
    found = [row for group in groups for row in session.execute(group).all()]
    found.sort(key=lambda row: (row.position, row.task, row.key, row.seed))
    return [_Run._make(row[:-1]) for row in found]


def _points(
    session: Session, runs: Sequence[int], metric: str, split: str, most: int
) -> dict[int, list[tuple[int, float]]]:
    """The steps and values of runs, by run, at most `most` of each."""
    found: dict[int, list[tuple[int, float]]] = {}
    for group in _groups(runs):
        rows = select(Metric.run_id, Metric.step, Metric.value)
        rows = rows.where(Metric.run_id.in_(group), Metric.split == split, Metric.name == metric)
        for run, step, value in session.execute(rows.order_by(Metric.run_id, Metric.step)).all():
            found.setdefault(run, []).append((step, value))
        for run in group:
            if len(own := found.get(run, [])) > most:
                gaps = len(own) - 1
                found[run] = [
                    point
                    for i, point in enumerate(own)
                    if not i or i * (most - 1) // gaps > (i - 1) * (most - 1) // gaps
                ]
    return found


def _last_values(
    session: Session,
    runs: str,
    metrics: Iterable[tuple[str, str]] | None,
    given: dict[str, int | Sequence[str]],
) -> Iterator[Sequence[Any]]:
    """Rows of run, split, name, step and value: the metrics at their last step of the runs that an SQL query gives."""
    if metrics is None:
        last = _last_steps(runs, **given)
        yield from session.execute(select(last.c.run_id, last.c.split, last.c.name, last.c.step, last.c.value))
        return
    query = text(LAST_STEP_OF_ONE.format(runs=runs))
    for split, name in sorted(set(metrics)):
        yield from session.execute(query.bindparams(*_parameters({**given, "split": split, "name": name}))).all()


def _parameters(given: Mapping[str, int | str | Sequence[str]]) -> list[BindParameter[Any]]:
    return [bindparam(key, value, expanding=not isinstance(value, int | str)) for key, value in given.items()]


def _last_steps(runs: str, **given: int | Sequence[str]) -> Subquery:
    """run_id, split, name, step and value of each metric at its last step, of the runs that an SQL query gives.

    given: the query's parameters.
    Reads a few entries of the primary key for each metric, however many steps there are: it goes from a split to the
    one before it, and so with names. `GROUP BY` would read every step. The values are looked up here, since SQLite's
    planner reads every step where the table of metrics is joined. It is text, since SQLAlchemy would take longer to put
    this query together than a database takes to run it.
    """
    kinds: dict[str, type[Any]] = {"run_id": Integer, "split": String, "name": String, "step": Integer, "value": Double}
    columns = [column(name, kind) for name, kind in kinds.items()]
    return text(LAST_STEPS.format(runs=runs)).bindparams(*_parameters(given)).columns(*columns).subquery("last")
