"""Reads the ledger. Rows come out detached from the database, so that pages may keep them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy import ColumnElement, Engine, Select, Subquery, and_, func, or_, select
from sqlalchemy.orm import Session

from deltalab.errors import InputError, unknown
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
from deltalab.store.records import CurvePoint, FinalMetric, TrialRow, TrialSummary

T = TypeVar("T")
KEYS_AT_ONCE = 500  # databases limit how many values a statement may have


class Ledger:
    """The ledger, to be read. Every method raises `InputError` where the database is locked, full or gone."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shown(self._engine.url)})"

    def __getstate__(self) -> None:
        raise TypeError("the store stays in the driver's process; send records to it")

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with told(self._engine.url), Session(self._engine) as session:
            yield session

    def studies(self) -> list[Study]:
        """All studies, the latest first."""
        with self._reading() as session:
            return list(session.scalars(select(Study).order_by(Study.created_at.desc(), Study.id.desc())))

    def study(self, address: str | int, profile: str | None = None) -> Study:
        """The study at an address: its id, NAME or NAME:PROFILE.

        NAME alone is the run of the default profile; where there is none, the latest run of any profile.
        profile: an alternative to writing NAME:PROFILE. Of several matches the latest is used.
        Raises `InputError` where there is no such study, and lists those that there are.
        """
        studies = self.studies()
        name, _, own = str(address).partition(":")
        if own and profile not in (None, own):
            raise InputError(f"study '{address}' names one profile, --profile '{profile}' another: give one of them")
        profile = profile or own or None
        named = [] if isinstance(address, int) else [study for study in studies if study.name == name]
        if not named:
            named = [study for study in studies if str(study.id) == str(address)]
        elif profile is None:
            named = [study for study in named if study.profile is None] or named
        for study in named:
            if profile is None or study.profile == profile:
                return study
        asked = f"{named[0].name}:{profile}" if named else address
        raise unknown("study", asked, sorted({study.address for study in studies}), where=shown(self._engine.url))

    def arms(self, study_id: int) -> list[Arm]:
        """A study's arms in the order of its plan."""
        with self._reading() as session:
            return list(session.scalars(select(Arm).where(Arm.study_id == study_id).order_by(Arm.position)))

    def trials(self, study_id: int, *, limit: int | None = None, offset: int = 0) -> list[TrialRow]:
        """A study's trials by arm, stage ("tune" last) and number; a shared trial appears in each of its arms."""
        rows = (
            select(Arm.name, ArmTrial.number, ArmTrial.values, Trial, RuleVersion.name, RuleVersion.hash)
            .join_from(Arm, ArmTrial)
            .join(Trial)
            .join(RuleVersion)
            .where(Arm.study_id == study_id)
            .order_by(Arm.position, Trial.stage, Trial.task, ArmTrial.number, Trial.id)
            .limit(limit)
            .offset(offset)
        )
        with self._reading() as session:
            found = session.execute(rows).all()
            states: dict[int, dict[int, RunState]] = {}
            for ids in _groups(trial.id for _, _, _, trial, _, _ in found):
                runs = select(Run.trial_id, Run.seed, Run.state).where(Run.trial_id.in_(ids)).order_by(Run.seed)
                for trial_id, seed, state in session.execute(runs):
                    states.setdefault(trial_id, {})[seed] = state
        return [
            TrialRow(
                arm=arm,
                number=number,
                values=values,
                key=trial.key,
                task=trial.task,
                task_version=trial.task_version,
                stage=trial.stage,
                state=trial.state,
                error=trial.error,
                config=trial.config,
                rule=rule,
                rule_hash=rule_hash,
                started_at=trial.started_at,
                finished_at=trial.finished_at,
                seconds=trial.seconds,
                parameters=trial.parameters,
                state_size=trial.state_size,
                tokens_per_second=trial.tokens_per_second,
                hardware=trial.hardware,
                runs=states.get(trial.id, {}),
            )
            for arm, number, values, trial, rule, rule_hash in found
        ]

    def known_trials(self, keys: Iterable[str]) -> dict[str, TrialSummary]:
        """Summaries of the trials among `keys` that any study has recorded, by key."""
        known: dict[str, TrialSummary] = {}
        with self._reading() as session:
            for group in _groups(keys):
                chosen = Trial.key.in_(group)
                for trial in session.scalars(select(Trial).where(chosen)):
                    known[trial.key] = TrialSummary(trial.key, trial.state, trial.error, [], {}, trial.parameters)
                diverged = select(Trial.key, Run.seed).join(Run).where(chosen, Run.state == "diverged")
                for key, seed in session.execute(diverged.order_by(Run.seed)):
                    known[key].diverged.append(seed)
                last = _last_steps(select(Run.id).join(Trial).where(chosen, Run.state == "done"))
                finals = select(Trial.key, Run.seed, Metric.split, Metric.name, Metric.value)
                for key, seed, split, name, value in session.execute(
                    finals.join_from(Trial, Run).join(Metric).join(last, _is_last(last)).order_by(Run.seed)
                ):
                    known[key].finals.setdefault((split, name), {})[seed] = value
        return known

    def final_metrics(self, study_id: int, *, stage: Stage | None = None) -> list[FinalMetric]:
        """Each run's metrics at their last step; `run_state` tells diverged runs from finished ones."""
        last, held = _last_steps(_runs_of(study_id, stage)), _held()
        rows = (
            select(
                Arm.name,
                Trial.task,
                Trial.stage,
                Trial.key,
                Run.seed,
                Run.state,
                Metric.split,
                Metric.name,
                Metric.step,
                Metric.value,
            )
            .join_from(Arm, held, held.c.arm_id == Arm.id)
            .join(Trial, held.c.trial_id == Trial.id)
            .join(Run)
            .join(Metric)
            .join(last, _is_last(last))
            .where(Arm.study_id == study_id)
            .order_by(Arm.position, Trial.task, Trial.key, Run.seed, Metric.split, Metric.name)
        )
        with self._reading() as session:
            return [FinalMetric._make(row) for row in session.execute(rows)]

    def curves(
        self,
        study_id: int,
        task: str,
        metric: str,
        split: str,
        *,
        stage: Stage = "confirm",
        max_points: int = 2000,
    ) -> list[CurvePoint]:
        """Learning curves of each arm and seed, thinned evenly to `max_points`; both ends are kept.

        Of n points, point i = 0..n-1 is kept where floor(i (m-1) / (n-1)) grows: exactly m = max_points.
        """
        if max_points < 2:
            raise ValueError("max_points is at least 2: the first and the last")
        runs = _runs_of(study_id, stage).where(Trial.task == task)
        points = (
            select(
                Metric.run_id,
                Metric.step,
                Metric.value,
                (func.row_number().over(partition_by=Metric.run_id, order_by=Metric.step) - 1).label("i"),
                func.count().over(partition_by=Metric.run_id).label("n"),
            )
            .where(Metric.run_id.in_(runs), Metric.split == split, Metric.name == metric)
            .subquery()
        )
        i, n, m = points.c.i, points.c.n, max_points
        gaps = func.nullif(n - 1, 0)  # SQL may divide before it evaluates `n <= m`
        kept = or_(n <= m, i == 0, (i * (m - 1)) // gaps > ((i - 1) * (m - 1)) // gaps)
        held = _held()
        rows = (
            select(Arm.name, Trial.key, Trial.stage, Run.seed, points.c.step, points.c.value)
            .join_from(Arm, held, held.c.arm_id == Arm.id)
            .join(Trial, held.c.trial_id == Trial.id)
            .join(Run)
            .join(points, points.c.run_id == Run.id)
            .where(Arm.study_id == study_id, kept)
            .order_by(Arm.position, Trial.key, Run.seed, points.c.step)
        )
        with self._reading() as session:
            return [CurvePoint._make(row) for row in session.execute(rows)]

    def rule_versions(self, study_id: int) -> list[RuleVersion]:
        """The rules as this study ran them."""
        used = select(Trial.rule_version_id).join(ArmTrial).join(Arm).where(Arm.study_id == study_id)
        rows = select(RuleVersion).where(RuleVersion.id.in_(used)).order_by(RuleVersion.name, RuleVersion.id)
        with self._reading() as session:
            return list(session.scalars(rows))

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


def _held() -> Subquery:
    """Pairs of arm and trial, each once, although an arm may have a trial under two numbers."""
    return select(ArmTrial.arm_id, ArmTrial.trial_id).distinct().subquery()


def _runs_of(study_id: int, stage: Stage | None) -> Select[int]:
    runs = select(Run.id).join(Trial).join(ArmTrial).join(Arm).where(Arm.study_id == study_id)
    return runs.where(Trial.stage == stage) if stage else runs


def _last_steps(runs: Select[int]) -> Subquery:
    return (
        select(Metric.run_id, Metric.split, Metric.name, func.max(Metric.step).label("step"))
        .where(Metric.run_id.in_(runs))
        .group_by(Metric.run_id, Metric.split, Metric.name)
        .subquery()
    )


def _is_last(last: Subquery) -> ColumnElement[bool]:
    return and_(
        Metric.run_id == last.c.run_id,
        Metric.split == last.c.split,
        Metric.name == last.c.name,
        Metric.step == last.c.step,
    )
