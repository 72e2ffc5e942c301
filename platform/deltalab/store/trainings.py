"""Records trainings of exported folders in the ledger, and reads the trainings for reports and pages."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, insert, or_, select, tuple_
from sqlalchemy.orm import Session

from deltalab.errors import InputError
from deltalab.reading import MOST_JSON, read_text
from deltalab.store.ledger import Store
from deltalab.store.models import Arm, ArmTrial, Study, Training, TrainingComparison, TrainingMetric, Trial
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

RUN, METRICS, EVALUATIONS = "run.json", "metrics.jsonl", "evaluations.json"
EVALUATION = "evaluation"
"""The split of the results of `deltalab eval`. In this split, a metric's name is `TASK METRIC`, or `TASK METRIC
(SETTING)` where the task was not asked as by default."""
MARKS = {"limit": "limit {}", "few_shot": "{}-shot", "max_length": "max length {}", "other_data": "data {}"}
"""How a metric's name says each part of a `deltalab.evaluation.results.Setting` besides the split."""
STDERR = "evaluation_stderr"
"""The split of the standard errors of these results, which have the names of the results."""
SPEED = "tokens_per_second"
ROWS_AT_ONCE = 200

Values = dict[str, Any]
Metrics = dict[tuple[str, str, int], float]
"""(split, name, step) -> value."""


@dataclass(frozen=True)
class ComparisonRow:
    """The difference of a training's model to another one on a metric, item by item.

    Attributes:
        name: `TASK METRIC`, as in the evaluations.
        reference: The other model: a training's name or, of a model without one, its folder or its name on the Hub, and
            its step.
        is_log: Whether the logarithms of the values are compared.
        difference: The value of the training's model less that of the other one.
        low: The lower end of the interval, which holds together with those of the family.
        high: The upper end of the interval.
        p: The p-value of "no difference" in the whole family.
        items: The number of items.
        family: The number of differences whose intervals hold together.
    """

    name: str
    reference: str
    is_log: bool
    difference: float
    low: float
    high: float
    p: float
    items: int
    family: int


@dataclass(frozen=True)
class TrainingRow:
    """A training, with the last value of each metric.

    Attributes:
        name: The name of the run's folder.
        study: The address of the study whose arm was exported; None if it is not known.
        arm: The arm that was exported; None if it is not known.
        parameters: The number of parameters of the model.
        started_at: When the training started.
        steps: The number of steps trained so far.
        tokens: The number of tokens trained so far.
        losses: split -> the last loss, in nats per token.
        tokens_per_second: The median speed over the run.
        evaluations: `TASK METRIC` -> value at the last step at which it was measured.
        stderrs: `TASK METRIC` -> the standard error of this value, where it is known.
        comparisons: The differences of these values to those of other models.
        about: `run.json` without the command, which may hold a database's password.
    """

    id: int
    run: str
    name: str
    study: str | None
    arm: str | None
    rule: str
    parameters: int | None
    started_at: datetime
    steps: int
    tokens: int
    losses: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float | None = None
    evaluations: dict[str, float] = field(default_factory=dict)
    stderrs: dict[str, float] = field(default_factory=dict)
    comparisons: list[ComparisonRow] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingPoint:
    """A point of a training's curve.

    Attributes:
        tokens: The number of tokens trained up to this step.
        seconds: The training time up to this step, computed from the measured tokens per second; None if no speed is
            known.
        value: The value of the metric.
    """

    training: int
    step: int
    tokens: int
    seconds: float | None
    value: float


def require_run(folder: Path) -> None:
    """Raises `InputError` if a folder is not that of a run."""
    _facts(folder, _json(folder / RUN))


@waited
def record(store: Store, run_folder: str | Path) -> int:
    """Records a run's folder as a training in the ledger, or updates the training that the ledger has of this run.

    Recording an unchanged folder again changes nothing. The function reads `run.json`, and also `metrics.jsonl` and
    `evaluations.json` if they exist. If a metric has several
    values at a step, the last one counts. A value that is not finite is not recorded.

    Returns:
        The training's number in the ledger.

    Raises:
        InputError: The folder is not that of a run, or a file cannot be read. The message names the line of the file.
    """
    folder = Path(run_folder)
    about = _json(folder / RUN)
    metrics, compared = _metrics(folder / METRICS), list[Values]()
    if (folder / EVALUATIONS).is_file():
        results, compared = _evaluations(folder / EVALUATIONS)
        metrics |= results
    facts = _facts(folder, about)
    with store._writing() as session:
        training = session.scalar(select(Training).where(Training.run == facts["run"]))
        if training is None:
            training = Training(**facts)
            session.add(training)
            session.flush()
        else:
            for name, value in facts.items():
                setattr(training, name, value)
        _write(session, training, metrics)
        _write_comparisons(session, training.id, compared)
        return training.id


@waited
def add_evaluations(
    store: Store, run: str, evaluations: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]] = ()
) -> bool:
    """Adds evaluations, and comparisons with other models, to the training that the ledger has of a run.

    Args:
        run: The id of the run.
        evaluations: Mappings with the keys step, task, metric and value, and perhaps stderr and those of a setting.
        comparisons: Mappings as `evaluations.json` has them.

    Returns:
        Whether the ledger has a training of this run.
    """
    metrics = _results(evaluations)
    with store._writing() as session:
        training = session.scalar(select(Training).where(Training.run == run))
        if training is not None:
            _write(session, training, metrics)
            _write_comparisons(session, training.id, _comparisons(comparisons))
    return training is not None


@waited
def trainings(store: Ledger, study: Study | None = None) -> list[TrainingRow]:
    """Returns the trainings of a study, or all trainings if `study` is None, sorted by their start.

    A training names the address of its study. Several studies may have the same address. If a training also names the
    trial that was exported, and the ledger holds this trial, the training belongs to the studies that have the trial.
    """
    query = select(Training).order_by(Training.started_at, Training.id)
    if study is not None:
        query = query.where(Training.study == study.address)
    with store._reading() as session:
        rows = list(session.scalars(query))
        if study is not None:
            rows = [training for training in rows if _belongs(session, training, study)]
        return [_row(session, training) for training in rows]


@waited
def has_trainings(store: Ledger) -> bool:
    """Whether any training is recorded."""
    with store._reading() as session:
        return session.scalar(select(Training.id).limit(1)) is not None


@waited
def measured(store: Ledger) -> list[tuple[str, str]]:
    """Returns the pairs (split, metric) for which trainings have curves. Results of `deltalab eval` are left out."""
    rows = (
        select(TrainingMetric.split, TrainingMetric.name)
        .distinct()
        .where(TrainingMetric.split.not_in((EVALUATION, STDERR)))
    )
    with store._reading() as session:
        return sorted((split, name) for split, name in session.execute(rows))


@waited
def curves(store: Ledger, ids: Sequence[int], split: str, name: str, *, max_points: int = 2000) -> list[TrainingPoint]:
    """Returns the curves of one metric in several trainings.

    Each curve is thinned to at most `max_points` points. Its last point is kept.
    """
    points = []
    with store._reading() as session:
        for training in session.scalars(select(Training).where(Training.id.in_(list(ids))).order_by(Training.id)):
            values = _series(session, training.id, split, name)
            clock = _clock(_series(session, training.id, "train", SPEED), training.tokens_per_step)
            spacing = max(1, math.ceil(len(values) / max_points))
            for step, value in values[::-1][::spacing][::-1]:
                seconds = _at(clock, step)
                points.append(TrainingPoint(training.id, step, step * training.tokens_per_step, seconds, value))
    return points


def _facts(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a training's columns. `about` has the contents of the run's `run.json`."""
    try:
        batch = about["recipe"]["batch"]
        started = about["started"]
        started_at = (
            datetime.fromisoformat(started) if isinstance(started, str) else datetime.fromtimestamp(started, UTC)
        )
        return {
            "run": str(about["id"]),
            "name": folder.resolve().name,
            "study": about.get("study"),
            "arm": about.get("arm"),
            "rule": str(about["rule"]),
            "parameters": about.get("parameters"),
            "tokens_per_step": int(batch["sequences"]) * int(batch["length"]),
            "started_at": started_at if started_at.tzinfo else started_at.replace(tzinfo=UTC),
            "about": dict(about),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / RUN}: is not that of a run: {type(error).__name__}: {error}") from None


def _metrics(file: Path) -> Metrics:
    """Reads a `metrics.jsonl`. Returns no metrics if there is no such file."""
    if not file.is_file():
        return {}
    metrics: Metrics = {}
    try:
        # While the run still trains, its last line may be half written.
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            value = math.nan if row["value"] is None else float(row["value"])
            metrics[str(row["split"]), str(row["name"]), int(row["step"])] = value
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}:{number}: is no metric: {type(error).__name__}: {error}") from None
    return {key: value for key, value in metrics.items() if math.isfinite(value)}


def _evaluations(file: Path) -> tuple[Metrics, list[Values]]:
    """Reads an `evaluations.json`: its results and its comparisons."""
    try:
        content = _json(file)
        return _results(content["evaluations"]), _comparisons(content.get("comparisons", []))
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file}: holds no evaluations: {type(error).__name__}: {error}") from None


def _results(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    """Returns the values of evaluations, and their standard errors. Those that are not finite are left out."""
    metrics: Metrics = {}
    for row in rows:
        for split, value in ((EVALUATION, row["value"]), (STDERR, row.get("stderr"))):
            if value is not None and math.isfinite(value):
                metrics[split, _named(row), int(row["step"] or 0)] = float(value)
    return metrics


def _named(row: Mapping[str, Any]) -> str:
    """The name of a value, with the setting of its evaluation where this is not the default.

    Examples:
        >>> _named({"task": "loss", "metric": "loss@64", "split": "validation", "limit": None})
        'loss loss@64'
        >>> _named({"task": "loss", "metric": "loss@64", "split": "test", "limit": 10})
        'loss loss@64 (test, limit 10)'
        >>> _named({"task": "arc_easy", "metric": "acc", "few_shot": 5, "max_length": 512})
        'arc_easy acc (5-shot, max length 512)'
    """
    split = row.get("split")
    marks = [str(split)] * (split not in (None, "validation"))
    marks += [text.format(row[key]) for key, text in MARKS.items() if row.get(key) is not None]
    return f"{row['task']} {row['metric']}" + (f" ({', '.join(marks)})" if marks else "")


def _comparisons(rows: Sequence[Mapping[str, Any]]) -> list[Values]:
    """Returns comparisons as rows of their table, without the training."""
    plain = ("reference", "is_log", "difference", "low", "high", "p", "items", "family")
    return [
        {
            "name": _named(row),
            "step": int(row["step"] or 0),
            "reference_step": int(row["reference_step"] or 0),
            **{key: row[key] for key in plain},
        }
        for row in rows
    ]


def _json(file: Path) -> dict[str, Any]:
    """Reads a file in a run's folder that holds a JSON object."""
    try:
        content = json.loads(read_text(file, most=MOST_JSON))
    except OSError as error:
        raise InputError(f"{file.parent}: is no run of `deltalab train`: {file.name}: {error.strerror}") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{file}: is no JSON object")
    return content


def _write(session: Session, training: Training, metrics: Metrics) -> None:
    """Writes metrics of a training. Rows that already have the right value are not touched."""
    table, training_id = TrainingMetric, training.id
    known = {
        (split, name, step): value
        for split, name, step, value in session.execute(
            select(table.split, table.name, table.step, table.value).where(table.training_id == training_id)
        )
    }
    stale = [key for key, value in metrics.items() if known.get(key, value) != value]
    # A standard error must not outlive the value that it belongs to.
    stale += [key for key in known.keys() - metrics.keys() if key[0] == STDERR and (EVALUATION, *key[1:]) in metrics]
    for start in range(0, len(stale), ROWS_AT_ONCE):
        in_group = tuple_(table.split, table.name, table.step).in_(stale[start : start + ROWS_AT_ONCE])
        session.execute(delete(table).where(table.training_id == training_id, in_group))
    for split, name, step in stale:
        if split == EVALUATION:  # A difference must not outlive either of its values.
            of = TrainingComparison
            own = (of.training_id == training_id) & (of.step == step)
            others = (of.reference == training.run) & (of.reference_step == step)
            session.execute(delete(of).where(of.name == name, or_(own, others)))
    fresh = [
        {"training_id": training_id, "split": split, "name": name, "step": step, "value": value}
        for (split, name, step), value in metrics.items()
        if known.get((split, name, step)) != value
    ]
    if fresh:
        session.execute(insert(table), fresh)


def _write_comparisons(session: Session, training_id: int, rows: Sequence[Values]) -> None:
    """Writes comparisons of a training in place of earlier ones of the same values."""
    table = TrainingComparison
    key = (table.name, table.step, table.reference, table.reference_step)
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[start : start + ROWS_AT_ONCE]
        keys = [tuple(row[column.key] for column in key) for row in part]
        session.execute(delete(table).where(table.training_id == training_id, tuple_(*key).in_(keys)))
        session.execute(insert(table), [{"training_id": training_id, **row} for row in part])


def _belongs(session: Session, training: Training, study: Study) -> bool:
    """Returns whether a training that names the address of a study belongs to this study."""
    key = (training.about.get("provenance") or {}).get("trial")
    if not isinstance(key, str):
        return True
    holders = select(Arm.study_id).join(ArmTrial).join(Trial).where(Trial.key == key)
    study_ids = set(session.scalars(holders))
    return not study_ids or study.id in study_ids


def _row(session: Session, training: Training) -> TrainingRow:
    """Returns a training with the last value of each metric."""
    table = TrainingMetric
    last = (
        select(table.split, table.name, func.max(table.step).label("step"))
        .where(table.training_id == training.id)
        .group_by(table.split, table.name)
        .subquery()
    )
    of_last_step = (table.split == last.c.split) & (table.name == last.c.name) & (table.step == last.c.step)
    rows = select(table.split, table.name, table.step, table.value).join(last, of_last_step)
    finals = {
        (split, name): (step, value)
        for split, name, step, value in session.execute(rows.where(table.training_id == training.id))
    }
    steps = max((step for (split, _), (step, _) in finals.items() if split == "train"), default=0)
    speeds = [value for _, value in _series(session, training.id, "train", SPEED)]
    return TrainingRow(
        id=training.id,
        run=training.run,
        name=training.name,
        study=training.study,
        arm=training.arm,
        rule=training.rule,
        parameters=training.parameters,
        started_at=training.started_at,
        steps=steps,
        tokens=steps * training.tokens_per_step,
        losses={split: value for (split, name), (_, value) in sorted(finals.items()) if name == "loss"},
        tokens_per_second=statistics.median(speeds) if speeds else None,
        evaluations={name: value for (split, name), (_, value) in sorted(finals.items()) if split == EVALUATION},
        stderrs={
            name: value
            for (split, name), (step, value) in sorted(finals.items())
            if split == STDERR and finals.get((EVALUATION, name), (None,))[0] == step
        },
        comparisons=_compared(
            session, training.id, {name: step for (split, name), (step, _) in finals.items() if split == EVALUATION}
        ),
        about={key: value for key, value in training.about.items() if key != "command"},
    )


def _compared(session: Session, training_id: int, steps: Mapping[str, int]) -> list[ComparisonRow]:
    """Returns the comparisons of a training's values at these steps, by the values' names."""
    table = TrainingComparison
    rows = (
        select(table, Training.name)
        .outerjoin(Training, Training.run == table.reference)
        .where(table.training_id == training_id)
        .order_by(table.name, table.reference, table.reference_step)
    )
    return [
        ComparisonRow(
            row.name,
            (name or row.reference) + (f" step-{row.reference_step}" if row.reference_step else ""),
            **{key: getattr(row, key) for key in ("is_log", "difference", "low", "high", "p", "items", "family")},
        )
        for row, name in session.execute(rows)
        if steps.get(row.name) == row.step
    ]


def _series(session: Session, training_id: int, split: str, name: str) -> list[tuple[int, float]]:
    """Returns the points (step, value) of one metric of a training, sorted by step."""
    table = TrainingMetric
    rows = select(table.step, table.value).where(
        table.training_id == training_id, table.split == split, table.name == name
    )
    return [(step, value) for step, value in session.execute(rows.order_by(table.step))]


def _clock(speeds: list[tuple[int, float]], tokens_per_step: int) -> list[tuple[int, float]]:
    """Returns points (step, seconds of training up to this step), computed from the tokens per second at each step."""
    clock = [(0, 0.0)]
    for step, speed in speeds:
        before, seconds = clock[-1]
        clock.append((step, seconds + (step - before) * tokens_per_step / speed if speed else seconds))
    return clock


def _at(clock: list[tuple[int, float]], step: int) -> float | None:
    """Returns the seconds at a step, on the line through the nearest two points of `clock`; None without speeds."""
    segment = None
    for segment in pairwise(clock):
        if step <= segment[1][0]:
            break
    if segment is None:
        return None
    (before, early), (after, late) = segment
    return early + (late - early) * (step - before) / (after - before) if after > before else late
