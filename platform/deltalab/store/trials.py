"""Reads the trials of a study a page at a time, and everything about one trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, case, func, null, select

from deltalab.errors import InputError
from deltalab.store.models import Arm, ArmTrial, Artifact, Metric, RuleVersion, Run, RunState, Stage, Study, Trial
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger, _last_steps

Sort = Literal["arm", "score", "seconds", "tokens_per_second", "finished_at"]
"""What a list of trials is sorted by. "arm": by arm, stage, task and number, as in the plan."""
State = Literal["done", "diverged", "failed", "infeasible"]
"""The state of a trial in a list. diverged: it is done, and at least one of its seeds diverged."""
KEYS_SHOWN = 5
"""Keys that an error names where a prefix is that of several trials."""
RUNS_OF_TRIAL = "SELECT run.id FROM run WHERE run.trial_id = :trial"


@dataclass(frozen=True)
class ListedTrial:
    """A trial in one arm of a study. score: the mean over the seeds that finished; None where no seed did.

    error: the traceback of a failed trial, the reason of an infeasible one. seeds: how many there are. diverged: those
    that did.
    """

    arm: str
    number: int
    values: dict[str, Any]
    key: str
    task: str
    stage: Stage
    state: State
    score: float | None
    error: str | None
    seeds: int
    diverged: list[int]
    seconds: float
    tokens_per_second: float | None
    finished_at: datetime
    rule: str


@dataclass(frozen=True)
class Listing:
    """A page of a study's trials. matching: how many pass the filters. total: how many the study has."""

    rows: list[ListedTrial]
    matching: int
    total: int


@dataclass(frozen=True)
class Holder:
    """A study and its arm that have a trial. values: those that tuning or a search gave it there."""

    study_id: int
    study: str
    profile: str | None
    arm: str
    is_base: bool
    number: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Seed:
    """A run. finals: (split, metric) -> its step and value at the last step."""

    seed: int
    state: RunState
    diverged_at: int | None
    finals: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    artifacts: list[Artifact] = field(default_factory=list)


@dataclass(frozen=True)
class Recorded:
    """Everything that the ledger holds of a trial but its curves. rule: its source as it ran."""

    trial: Trial
    rule: RuleVersion
    holders: list[Holder]
    seeds: list[Seed]


class Point(NamedTuple):
    """A point of a run's curve."""

    seed: int
    state: RunState
    split: str
    metric: str
    step: int
    value: float


@waited
def listed(
    store: Ledger,
    study_id: int,
    *,
    judged: Mapping[str, str],
    splits: Mapping[Stage, str],
    arms: Sequence[str] = (),
    tasks: Sequence[str] = (),
    stages: Sequence[Stage] = (),
    states: Sequence[State] = (),
    sort: Sort = "arm",
    descending: bool = False,
    limit: int = 100,
    offset: int = 0,
) -> Listing:
    """A page of a study's trials. The database filters and sorts, so that only the rows of the page are read.

    judged: task -> the metric whose mean is the score. splits: stage -> the split on which it is measured.
    arms, tasks, stages, states: what to list; empty means all. A trial without a value of `sort` comes last.
    """
    score, state = _score(judged, splits), _state()
    of_study = select(ArmTrial.arm_id, ArmTrial.trial_id, ArmTrial.number).join(Arm).join(Trial)
    of_study = of_study.where(Arm.study_id == study_id)
    asked: list[tuple[Any, Sequence[str]]] = [
        (Arm.name, arms),
        (Trial.task, tasks),
        (Trial.stage, stages),
        (state, states),
    ]
    filtered = of_study.where(*(column.in_(given) for column, given in asked if given))
    by = score if sort == "score" else None if sort == "arm" else getattr(Trial, sort)
    order: list[Any] = [Arm.position, Trial.stage, Trial.task, ArmTrial.number, Trial.id]
    if by is not None:
        order = [by.is_(None), by.desc() if descending else by, *order]
    elif descending:
        order = [column.desc() for column in order]
    page = filtered.order_by(*order).limit(limit).offset(offset).subquery()
    with store._reading() as session:
        total, matching = (
            session.scalars(select(func.count()).select_from(rows.subquery())).one() for rows in (of_study, filtered)
        )
        places = [(arm, trial, number) for arm, trial, number in session.execute(select(page))]
        # The costly columns are read in a second statement: a database computes a sorted query's columns for all rows.
        page_ids = [trial for _, trial, _ in places]
        columns = (
            ArmTrial.arm_id, ArmTrial.trial_id, ArmTrial.number, Arm.name, ArmTrial.values, Trial.key, Trial.task,
            Trial.stage, state, score, Trial.error, Trial.seconds, Trial.tokens_per_second, Trial.finished_at,
            RuleVersion.name,
        )  # fmt: skip
        of_page = select(*columns).join_from(ArmTrial, Arm).join(Trial).join(RuleVersion)
        of_page = of_page.where(Arm.study_id == study_id, ArmTrial.trial_id.in_(page_ids))
        found = {tuple(row[:3]): row[3:] for row in session.execute(of_page)}
        seeds: dict[int, dict[int, RunState]] = {}
        runs = select(Run.trial_id, Run.seed, Run.state).where(Run.trial_id.in_(page_ids))
        for trial, seed, ended in session.execute(runs.order_by(Run.seed)):
            seeds.setdefault(trial, {})[seed] = ended
    rows = []
    for place in places:
        arm, values, key, task, stage, said, mean, error, seconds, speed, finished, rule = found[place]
        own = seeds.get(place[1], {})
        rows.append(
            ListedTrial(
                arm=arm,
                number=place[2],
                values=values,
                key=key,
                task=task,
                stage=stage,
                state=said,
                score=mean,
                error=error,
                seeds=len(own),
                diverged=[seed for seed, ended in own.items() if ended == "diverged"],
                seconds=seconds,
                tokens_per_second=speed,
                finished_at=finished,
                rule=rule,
            )
        )
    return Listing(rows, matching, total)


@waited
def recorded(store: Ledger, key: str) -> Recorded:
    """The trial with this key, or the only one whose key begins with it.

    Raises `InputError` where no key begins so, and where several do.
    """
    with store._reading() as session:
        keys = list(
            session.scalars(
                select(Trial.key)
                .where(Trial.key.startswith(key, autoescape=True))
                .order_by(Trial.key != key, Trial.key)
                .limit(KEYS_SHOWN + 1)
            )
        )
        if not keys:
            raise InputError(f"no trial's key begins with '{key}'")
        if keys[0] != key and len(keys) > 1:
            more = ", ..." if len(keys) > KEYS_SHOWN else ""
            raise InputError(f"several trials' keys begin with '{key}': {', '.join(keys[:KEYS_SHOWN])}{more}")
        trial, rule = session.execute(select(Trial, RuleVersion).join(RuleVersion).where(Trial.key == keys[0])).one()
        columns = Study.id, Study.name, Study.profile, Arm.name, Arm.is_base, ArmTrial.number, ArmTrial.values
        holding = select(*columns).join_from(ArmTrial, Arm).join(Study).where(ArmTrial.trial_id == trial.id)
        holders = [Holder(*row) for row in session.execute(holding.order_by(Study.id, Arm.position, ArmTrial.number))]
        runs = list(session.scalars(select(Run).where(Run.trial_id == trial.id).order_by(Run.seed)))
        seeds = {run.id: Seed(run.seed, run.state, run.diverged_at) for run in runs}
        last = _last_steps(RUNS_OF_TRIAL, trial=trial.id)
        for run_id, split, name, step, value in session.execute(select(last).order_by(last.c.split, last.c.name)):
            seeds[run_id].finals[split, name] = step, value
        for artifact in session.scalars(
            select(Artifact).where(Artifact.run_id.in_(seeds)).order_by(Artifact.kind, Artifact.path)
        ):
            seeds[artifact.run_id].artifacts.append(artifact)
    return Recorded(trial, rule, holders, list(seeds.values()))


@waited
def curves_of(store: Ledger, trial_id: int, *, max_points: int = 500) -> list[Point]:
    """Every metric of every seed of a trial, each thinned evenly to at most `max_points`. The last point is kept."""
    same = (Metric.run_id, Metric.split, Metric.name)
    i = func.row_number().over(partition_by=same, order_by=Metric.step)
    n = func.count().over(partition_by=same)
    points = (
        select(*same, Metric.step, Metric.value, i.label("i"), n.label("n"))
        .where(Metric.run_id.in_(select(Run.id).where(Run.trial_id == trial_id)))
        .subquery()
    )
    every = (points.c.n + max_points - 1) // max_points
    rows = (
        select(Run.seed, Run.state, points.c.split, points.c.name, points.c.step, points.c.value)
        .join(points, points.c.run_id == Run.id)
        .where((points.c.n - points.c.i) % every == 0)
        .order_by(points.c.name, points.c.split, Run.seed, points.c.step)
    )
    with store._reading() as session:
        return [Point._make(row) for row in session.execute(rows)]


@waited
def arms_of_rule(store: Ledger, study_id: int, rule_version_id: int) -> list[str]:
    """The arms of a study with a trial of this version of a rule, in the order of the plan."""
    arms = select(ArmTrial.arm_id).join(Trial).where(Trial.rule_version_id == rule_version_id)
    rows = select(Arm.name).where(Arm.study_id == study_id, Arm.id.in_(arms)).order_by(Arm.position)
    with store._reading() as session:
        return list(session.scalars(rows))


def _score(judged: Mapping[str, str], splits: Mapping[Stage, str]) -> ColumnElement[Any]:
    """The mean over a trial's finished seeds of its metric's last value."""
    if not judged:
        return null()
    metric = case(judged, value=Trial.task)
    split = case(dict(splits), value=Trial.stage)
    last = (
        select(Metric.value)
        .where(Metric.run_id == Run.id, Metric.split == split, Metric.name == metric)
        .order_by(Metric.step.desc())
        .limit(1)
        .correlate(Run, Trial)
        .scalar_subquery()
    )
    done = Run.trial_id == Trial.id, Run.state == "done"
    return select(func.avg(last)).where(*done).correlate(Trial).scalar_subquery()


def _state() -> ColumnElement[str]:
    diverged = select(Run.id).where(Run.trial_id == Trial.id, Run.state == "diverged").correlate(Trial).exists()
    return case(((Trial.state == "done") & diverged, "diverged"), else_=Trial.state)
