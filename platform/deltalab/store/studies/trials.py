"""Reads the trials of a study a page at a time, and everything about one trial."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, case, func, null, select

from deltalab.errors import InputError
from deltalab.store.last_values import last_steps
from deltalab.store.models import Arm, ArmTrial, Artifact, Metric, RuleVersion, Run, RunState, Stage, Study, Trial
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

Sort = Literal["arm", "score", "seconds", "tokens_per_second", "finished_at"]
"""The value by which a list of trials is sorted. "arm" sorts by arm, stage, task and number, as the plan does."""
State = Literal["done", "diverged", "failed", "infeasible"]
"""The state of a trial in a list. "diverged": the trial is done, and at least one of its seeds diverged."""
KEYS_SHOWN = 5
"""The largest number of keys that an error lists if several keys begin with the text that a user gave."""
RUNS_OF_TRIAL = "SELECT run.id FROM run WHERE run.trial_id = :trial"


@dataclass(frozen=True)
class ListedTrial:
    """A trial in one arm of a study.

    Attributes:
        number: The trial's number in the arm.
        values: The values that tuning or a search gave the trial.
        key: The trial's key.
        stage: "tune" or "confirm".
        score: The mean score of the seeds that finished; None if no seed finished.
        error: The traceback of a failed trial, or the reason of an infeasible one.
        seeds: The number of seeds.
        diverged: The seeds that diverged.
        seconds: The trial's share of the training time of its stack.
        tokens_per_second: The speed of training.
        finished_at: When the trial ended.
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
    """A page of a study's trials.

    Attributes:
        rows: The trials of the page.
        matching: The number of trials that pass the filters.
        total: The number of trials that the study has.
    """

    rows: list[ListedTrial]
    matching: int
    total: int


@dataclass(frozen=True)
class Holder:
    """An arm of a study that has a certain trial.

    Attributes:
        study: The name of the study.
        profile: The profile of the study; None for the default profile.
        is_base: Whether the arm is the base of the study.
        number: The trial's number in the arm.
        values: The values that tuning or a search in this arm gave the trial.
    """

    study_id: int
    study: str
    profile: str | None
    arm: str
    is_base: bool
    number: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Seed:
    """A run, which is one seed of a trial.

    Attributes:
        state: "done" or "diverged".
        diverged_at: The step at which the run diverged; None if it did not.
        finals: (split, metric) -> (step, value) at the last step.
        artifacts: The files that the run wrote.
    """

    seed: int
    state: RunState
    diverged_at: int | None
    finals: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    artifacts: list[Artifact] = field(default_factory=list)


@dataclass(frozen=True)
class TrialDetails:
    """Everything that the ledger holds of a trial, except its curves.

    Attributes:
        trial: The row of the trial.
        rule: The version of the rule that ran.
        holders: The arms that have the trial.
        seeds: The runs of the trial.
    """

    trial: Trial
    rule: RuleVersion
    holders: list[Holder]
    seeds: list[Seed]


class Point(NamedTuple):
    """A point of the curve of a metric in a run."""

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
    """Returns a page of a study's trials. The database filters and sorts, so that only the rows of the page are read.

    A trial that lacks the value by which the list is sorted comes last.

    Args:
        judged: task -> the metric whose mean is the score.
        splits: stage -> the split on which that metric is measured.
        arms: The arms to list; empty for all.
        tasks: The tasks to list; empty for all.
        stages: The stages to list; empty for all.
        states: The states to list; empty for all.
        sort: The value by which the list is sorted.
        descending: Whether the largest value comes first.
        limit: The number of trials on a page.
        offset: The number of trials before the page.
    """
    score, state = _score(judged, splits), _state()
    of_study = select(ArmTrial.arm_id, ArmTrial.trial_id, ArmTrial.number).join(Arm).join(Trial)
    of_study = of_study.where(Arm.study_id == study_id)
    filters: list[tuple[Any, Sequence[str]]] = [
        (Arm.name, arms),
        (Trial.task, tasks),
        (Trial.stage, stages),
        (state, states),
    ]
    filtered = of_study.where(*(column.in_(wanted) for column, wanted in filters if wanted))
    sort_column = score if sort == "score" else None if sort == "arm" else getattr(Trial, sort)
    order: list[Any] = [Arm.position, Trial.stage, Trial.task, ArmTrial.number, Trial.id]
    if sort_column is not None:
        order = [sort_column.is_(None), sort_column.desc() if descending else sort_column, *order]
    elif descending:
        order = [column.desc() for column in order]
    page = filtered.order_by(*order).limit(limit).offset(offset).subquery()
    with store._reading() as session:
        total, matching = (
            session.scalars(select(func.count()).select_from(rows.subquery())).one() for rows in (of_study, filtered)
        )
        page_keys = [(arm, trial, number) for arm, trial, number in session.execute(select(page))]
        # A database computes the columns of a sorted query for all rows. So a second statement reads costly columns.
        page_ids = [trial for _, trial, _ in page_keys]
        columns = (
            ArmTrial.arm_id, ArmTrial.trial_id, ArmTrial.number, Arm.name, ArmTrial.values, Trial.key, Trial.task,
            Trial.stage, state, score, Trial.error, Trial.seconds, Trial.tokens_per_second, Trial.finished_at,
            RuleVersion.name,
        )  # fmt: skip
        page_query = select(*columns).join_from(ArmTrial, Arm).join(Trial).join(RuleVersion)
        page_query = page_query.where(Arm.study_id == study_id, ArmTrial.trial_id.in_(page_ids))
        cells = {tuple(row[:3]): row[3:] for row in session.execute(page_query)}
        seeds: dict[int, dict[int, RunState]] = {}
        runs = select(Run.trial_id, Run.seed, Run.state).where(Run.trial_id.in_(page_ids))
        for trial, seed, run_state in session.execute(runs.order_by(Run.seed)):
            seeds.setdefault(trial, {})[seed] = run_state
    rows = []
    for page_key in page_keys:
        arm, values, key, task, stage, trial_state, mean, error, seconds, speed, finished_at, rule = cells[page_key]
        run_states = seeds.get(page_key[1], {})
        rows.append(
            ListedTrial(
                arm=arm,
                number=page_key[2],
                values=values,
                key=key,
                task=task,
                stage=stage,
                state=trial_state,
                score=mean,
                error=error,
                seeds=len(run_states),
                diverged=[seed for seed, run_state in run_states.items() if run_state == "diverged"],
                seconds=seconds,
                tokens_per_second=speed,
                finished_at=finished_at,
                rule=rule,
            )
        )
    return Listing(rows, matching, total)


@waited
def find_trial(store: Ledger, key: str) -> TrialDetails:
    """Returns the trial with this key, or the only trial whose key begins with it.

    Raises:
        InputError: No trial's key begins with `key`, or several do.
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
            raise InputError(f"no trial's key begins with '{key}'", key=key)
        if keys[0] != key and len(keys) > 1:
            ellipsis = ", ..." if len(keys) > KEYS_SHOWN else ""
            several = f"several trials' keys begin with '{key}': {', '.join(keys[:KEYS_SHOWN])}{ellipsis}"
            raise InputError(several, key=key).with_fields(allowed=keys[:KEYS_SHOWN])
        trial, rule = session.execute(select(Trial, RuleVersion).join(RuleVersion).where(Trial.key == keys[0])).one()
        columns = Study.id, Study.name, Study.profile, Arm.name, Arm.is_base, ArmTrial.number, ArmTrial.values
        holding = select(*columns).join_from(ArmTrial, Arm).join(Study).where(ArmTrial.trial_id == trial.id)
        holders = [Holder(*row) for row in session.execute(holding.order_by(Study.id, Arm.position, ArmTrial.number))]
        runs = list(session.scalars(select(Run).where(Run.trial_id == trial.id).order_by(Run.seed)))
        seeds = {run.id: Seed(run.seed, run.state, run.diverged_at) for run in runs}
        last = last_steps(RUNS_OF_TRIAL, trial=trial.id)
        for run_id, split, name, step, value in session.execute(select(last).order_by(last.c.split, last.c.name)):
            seeds[run_id].finals[split, name] = step, value
        for artifact in session.scalars(
            select(Artifact).where(Artifact.run_id.in_(seeds)).order_by(Artifact.kind, Artifact.path)
        ):
            seeds[artifact.run_id].artifacts.append(artifact)
    return TrialDetails(trial, rule, holders, list(seeds.values()))


@waited
def curves_of(store: Ledger, trial_id: int, *, max_points: int = 500) -> list[Point]:
    """Returns all curves of a trial, each thinned evenly to at most `max_points` points. Its last point is kept."""
    curve = (Metric.run_id, Metric.split, Metric.name)
    i = func.row_number().over(partition_by=curve, order_by=Metric.step)
    n = func.count().over(partition_by=curve)
    points = (
        select(*curve, Metric.step, Metric.value, i.label("i"), n.label("n"))
        .where(Metric.run_id.in_(select(Run.id).where(Run.trial_id == trial_id)))
        .subquery()
    )
    spacing = (points.c.n + max_points - 1) // max_points
    rows = (
        select(Run.seed, Run.state, points.c.split, points.c.name, points.c.step, points.c.value)
        .join(points, points.c.run_id == Run.id)
        .where((points.c.n - points.c.i) % spacing == 0)
        .order_by(points.c.name, points.c.split, Run.seed, points.c.step)
    )
    with store._reading() as session:
        return [Point._make(row) for row in session.execute(rows)]


@waited
def arms_of_rule(store: Ledger, study_id: int, rule_version_id: int) -> list[str]:
    """Returns the names of a study's arms that have a trial with this version of a rule, in the order of the plan."""
    arms = select(ArmTrial.arm_id).join(Trial).where(Trial.rule_version_id == rule_version_id)
    rows = select(Arm.name).where(Arm.study_id == study_id, Arm.id.in_(arms)).order_by(Arm.position)
    with store._reading() as session:
        return list(session.scalars(rows))


def _score(judged: Mapping[str, str], splits: Mapping[Stage, str]) -> ColumnElement[Any]:
    """Returns a column for a trial's score: the mean, over the seeds that finished, of its metric's last value."""
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
    """Returns a column for the `State` of a trial in a list."""
    diverged = select(Run.id).where(Run.trial_id == Trial.id, Run.state == "diverged").correlate(Trial).exists()
    return case(((Trial.state == "done") & diverged, "diverged"), else_=Trial.state)
