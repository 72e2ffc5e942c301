"""Reads the ledger. The rows that it returns are detached from the database, so that a page may keep them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar, get_args

from sqlalchemy import (
    ColumnElement,
    Engine,
    func,
    select,
    true,
)
from sqlalchemy.orm import Session

from deltalab.errors import InputError, unknown
from deltalab.reading import pairs
from deltalab.store import drivers
from deltalab.store.database import display_url, input_errors
from deltalab.store.last_values import last_steps, last_values
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
KEYS_AT_ONCE = 500
"""The number of keys in one statement. Databases limit how many values a statement may have."""

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


class Ledger:
    """Reads an open ledger.

    Every method waits for a database that is gone, and raises `InputError` if the database does not come back.
    """

    def __init__(self, engine: Engine, patience: float = PATIENCE_SECONDS) -> None:
        self._engine = engine
        self.patience = Patience(patience)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({display_url(self._engine.url)})"

    def __getstate__(self) -> None:
        raise TypeError("the store stays in the driver's process; send records to it")

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        """Opens a transaction that reads."""
        with input_errors(self._engine.url), Session(self._engine) as session:
            yield session

    def studies(self) -> list[Study]:
        """Returns all studies that are not deleted, the latest first. A study whose driver is gone is "interrupted"."""
        return self._studies(true())

    def study(
        self, address: str | int, profile: str | None = None, overrides: Mapping[str, Any] | None = None
    ) -> Study:
        """Returns the study at an address. If several studies match, it returns the latest.

        NAME alone means the study under the default profile. If the default profile has no such study, any profile
        matches. Without `overrides`, a study that has no overrides is preferred.

        Args:
            address: The study's id, NAME or NAME:PROFILE.
            profile: The profile, as an alternative to NAME:PROFILE.
            overrides: key -> value of the overrides with which the study ran.

        Raises:
            InputError: There is no such study, or it is deleted. The message lists the studies, or says how to restore
                the deleted study.
        """
        name, _, profile_of_address = str(address).partition(":")
        if profile_of_address and profile not in (None, profile_of_address):
            raise InputError(f"study '{address}' names one profile, --profile '{profile}' another: give one of them")
        profile = profile or profile_of_address or None
        matches = [] if isinstance(address, int) else self._studies(Study.name == name)
        if not matches and name.isdecimal() and len(name) < 10:  # databases take no larger integers as an id
            matches = self._studies(Study.id == int(name))
        elif profile is None:
            matches = [study for study in matches if study.profile is None] or matches
        shown_address = f"{matches[0].name}:{profile}" if matches and profile else address
        matches = [study for study in matches if profile in (None, study.profile)]
        if matches and overrides:
            with_overrides = [study for study in matches if study.overrides == overrides]
            if not with_overrides:
                overrides_of_matches = [study.overridden or "no overrides" for study in matches]
                raise unknown(
                    f"run of study '{shown_address}' with",
                    pairs(overrides),
                    overrides_of_matches,
                    where=display_url(self._engine.url),
                )
            return with_overrides[0]
        for study in [*(study for study in matches if not study.overrides), *matches]:
            return study
        if deleted_id := self._deleted(str(shown_address)):
            raise InputError(
                f"{display_url(self._engine.url)}: study '{shown_address}' is deleted; "
                f"`deltalab study restore {deleted_id}` brings it back"
            )
        addresses = sorted({study.address for study in self.studies()})
        raise unknown("study", shown_address, addresses, where=display_url(self._engine.url))

    @waited
    def _studies(self, condition: ColumnElement[bool]) -> list[Study]:
        """Returns the studies that meet a condition, the latest first."""
        with self._reading() as session:
            rows = select(Study).where(condition, Study.deleted_at.is_(None))
            studies = list(session.scalars(rows.order_by(Study.created_at.desc(), Study.id.desc())))
            drivers.mark_interrupted(session, studies)
            return studies

    @waited
    def _deleted(self, address: str) -> int | None:
        """Returns the id of the latest deleted study at an address, or None if there is none."""
        with self._reading() as session:
            for study in session.scalars(select(Study).where(Study.deleted_at.is_not(None)).order_by(Study.id.desc())):
                if address in (str(study.id), study.name, study.address):
                    return study.id
        return None

    @waited
    def arms(self, study_id: int) -> list[Arm]:
        """Returns a study's arms in the order of its plan."""
        with self._reading() as session:
            return list(session.scalars(select(Arm).where(Arm.study_id == study_id).order_by(Arm.position)))

    @waited
    def placed(self, study_id: int) -> list[Placed]:
        """Returns each trial of a study with its number and end, in the order of `trials`.

        A reader who compares two results finds the trials that are new.
        """
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
        """Returns a text that changes when the study's state changes or a trial is recorded, attached or forgotten."""
        trials = (
            select(func.count(), func.max(Trial.finished_at), func.sum(ArmTrial.trial_id))
            .join_from(ArmTrial, Trial)
            .where(ArmTrial.arm_id.in_(select(Arm.id).where(Arm.study_id == study_id)))
        )
        with self._reading() as session:
            study = session.get_one(Study, study_id)
            drivers.mark_interrupted(session, [study])
            return " ".join(map(str, (study.state, study.finished_at, *session.execute(trials).one())))

    @waited
    def trials(
        self, study_id: int, *, limit: int | None = None, offset: int = 0, trials: Iterable[str] | None = None
    ) -> list[TrialRow]:
        """Returns a study's trials, sorted by arm, stage ("tune" last), task and number.

        A trial that several arms share is returned once for each arm.

        Args:
            limit: The largest number of trials to return.
            offset: The number of trials to skip before these.
            trials: The keys of the trials to read; None reads all. More than `KEYS_AT_ONCE` keys are read in groups,
                and only the trials within a group are sorted.
        """
        keys = None if trials is None else list(trials)
        columns = [getattr(Trial, name) for name in TRIAL_COLUMNS]  # whole Trial objects take twice as long
        rows = (
            select(Arm.name, ArmTrial.number, ArmTrial.values, RuleVersion.name, RuleVersion.hash, Trial.id, *columns)
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
            # By the connection: the session's rows of columns take half as long again.
            trial_rows = [row for group in groups for row in session.connection().execute(group)]
            states: dict[int, dict[int, RunState]] = {}
            for ids in _groups(row[5] for row in trial_rows):
                runs = select(Run.trial_id, Run.seed, Run.state).where(Run.trial_id.in_(ids)).order_by(Run.seed)
                for trial_id, seed, state in session.connection().execute(runs):
                    states.setdefault(trial_id, {})[seed] = state
        return [
            TrialRow(
                arm=arm,
                number=number,
                values=values,
                rule=rule,
                rule_hash=rule_hash,
                runs=states.get(trial_id, {}),
                **dict(zip(TRIAL_COLUMNS, cells, strict=True)),
            )
            for arm, number, values, rule, rule_hash, trial_id, *cells in trial_rows
        ]

    def known_trials(self, keys: Iterable[str]) -> dict[str, TrialSummary]:
        """Returns the summaries of the trials in the ledger whose key is in `keys`: key -> summary."""
        return self._known_trials(list(keys))

    @waited
    def _known_trials(self, keys: list[str]) -> dict[str, TrialSummary]:
        summaries: dict[str, TrialSummary] = {}
        with self._reading() as session:
            for group in _groups(keys):
                in_group = Trial.key.in_(group)
                for trial in session.scalars(select(Trial).where(in_group)):
                    summaries[trial.key] = TrialSummary(
                        trial.key, trial.state, trial.error, [], {}, trial.parameters, trial.seconds
                    )
                if summaries.keys().isdisjoint(group):
                    continue
                diverged = select(Trial.key, Run.seed).join(Run).where(in_group, Run.state == "diverged")
                for key, seed in session.execute(diverged.order_by(Run.seed)):
                    summaries[key].diverged.append(seed)
                last = last_steps(DONE_RUNS, keys=group)
                finals = select(Trial.key, Run.seed, last.c.split, last.c.name, last.c.value)
                finals = finals.join_from(Trial, Run).join(last, last.c.run_id == Run.id)
                # PostgreSQL does not know how few runs `last` has. Without `in_group`, it would read all runs.
                for key, seed, split, name, value in session.execute(finals.where(in_group).order_by(Run.seed)):
                    summaries[key].finals.setdefault((split, name), {})[seed] = value
        return summaries

    @waited
    def final_metrics(
        self,
        study_id: int,
        *,
        stage: Stage | None = None,
        metrics: Iterable[tuple[str, str]] | None = None,
        trials: Iterable[str] | None = None,
    ) -> list[FinalMetric]:
        """Returns the last value of each metric in each run of a study. `run_state` tells which runs diverged.

        Args:
            stage: The stage to read; None reads both.
            metrics: The pairs (split, metric) to read; None reads all, which takes much longer than a few pairs.
            trials: The keys of the trials to read; None reads all.
        """
        keys = None if trials is None else list(trials)
        values_of: dict[int, list[tuple[str, str, int, float]]] = {}
        with self._reading() as session:
            runs = _runs(session, study_id, stage, None, keys)
            for group in [None] if keys is None else _groups(keys):
                parameters: dict[str, int | Sequence[str]] = {"study": study_id, "stages": _stages(stage)}
                if group is not None:
                    parameters["keys"] = group
                query = RUNS_OF_STUDY.format(among="" if group is None else " AND trial.key IN :keys")
                for run_id, split, name, step, value in last_values(session, query, metrics, parameters):
                    values_of.setdefault(run_id, []).append((split, name, step, value))
        return [FinalMetric._make(run[:-1] + last) for run in runs for last in sorted(values_of.get(run.id, ()))]

    @waited
    def measured(self, study_id: int) -> list[tuple[Stage, str, str, str]]:
        """Returns the metrics that a study measures, as tuples (stage, task, split, metric).

        The method looks only at the latest trial of each arm, stage and task.
        """
        latest = (
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
            .where(Trial.id.in_(latest))
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
        """Returns the learning curves of each arm and seed, thinned evenly to `max_points`. Both ends are kept.

        If a curve has n points, more than m = `max_points`, exactly m of them are kept. Point i = 0..n-1 is kept if
        i = 0, or if floor(i (m-1) / (n-1)) is larger than for the point before.

        Args:
            stage: The stage of the trials.
            max_points: The largest number of points of a curve, at least 2.
            trials: The keys of the trials to read; None reads all.
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
        """Returns the versions of rules that the trials of this study ran."""
        used = select(Trial.rule_version_id).join(ArmTrial).join(Arm).where(Arm.study_id == study_id)
        rows = select(RuleVersion).where(RuleVersion.id.in_(used)).order_by(RuleVersion.name, RuleVersion.id)
        with self._reading() as session:
            return list(session.scalars(rows))

    @waited
    def artifacts(self, study_id: int, arm: str) -> list[tuple[Trial, Run, Artifact]]:
        """Returns the files of an arm's runs, confirmed trials first."""
        trials_of_arm = select(ArmTrial.trial_id).join(Arm).where(Arm.study_id == study_id, Arm.name == arm)
        rows = (
            select(Trial, Run, Artifact)
            .join_from(Trial, Run)
            .join(Artifact)
            .where(Trial.id.in_(trials_of_arm))
            .order_by(Trial.stage, Trial.id, Run.seed, Artifact.kind, Artifact.path)
        )
        with self._reading() as session:
            return [(trial, run, artifact) for trial, run, artifact in session.execute(rows)]


def _groups(values: Iterable[T]) -> Iterator[list[T]]:
    """Yields the distinct values in groups that are small enough for one statement."""
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
    """Returns a list of this stage, or all stages if `stage` is None."""
    return [stage] if stage else get_args(Stage)


def _runs(
    session: Session, study_id: int, stage: Stage | None, task: str | None, keys: Sequence[str] | None
) -> list[_Run]:
    """Returns the runs of a study, sorted by arm, task, key and seed.

    If an arm has a trial under two numbers, each run of the trial is returned once. The metrics of the runs are read by
    another statement, since joining runs and metrics in SQL takes ten times as long.
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
    run_rows = [row for group in groups for row in session.connection().execute(group)]
    run_rows.sort(key=itemgetter(7, 1, 3, 4))
    return [_Run._make(row[:-1]) for row in run_rows]


def _points(
    session: Session, runs: Sequence[int], metric: str, split: str, most: int
) -> dict[int, list[tuple[int, float]]]:
    """Returns the curves of a metric: id of a run -> points (step, value). A curve has at most `most` points."""
    points: dict[int, list[tuple[int, float]]] = {}
    for group in _groups(runs):
        rows = select(Metric.run_id, Metric.step, Metric.value)
        rows = rows.where(Metric.run_id.in_(group), Metric.split == split, Metric.name == metric)
        for run, step, value in session.execute(rows.order_by(Metric.run_id, Metric.step)).all():
            points.setdefault(run, []).append((step, value))
        for run in group:
            if len(points_of_run := points.get(run, [])) > most:
                gaps = len(points_of_run) - 1
                points[run] = [
                    point
                    for i, point in enumerate(points_of_run)
                    if not i or i * (most - 1) // gaps > (i - 1) * (most - 1) // gaps
                ]
    return points
