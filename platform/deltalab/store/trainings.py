"""Trainings of exported folders: recorded from the folders of their runs, and read for reports and pages."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from sqlalchemy import delete, func, insert, select, tuple_
from sqlalchemy.orm import Session

from deltalab.errors import InputError
from deltalab.store.ledger import Store
from deltalab.store.models import Arm, ArmTrial, Study, Training, TrainingMetric, Trial
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

RUN, METRICS, EVALUATIONS = "run.json", "metrics.jsonl", "evaluations.json"
EVALUATION = "evaluation"
"""The split of what `platform eval` measured. A metric's name is `TASK METRIC` there."""
SPEED = "tokens_per_second"
ROWS_AT_ONCE = 200

Metrics = dict[tuple[str, str, int], float]
"""(split, name, step) -> value."""


@dataclass(frozen=True)
class TrainingRow:
    """A training, with its last values.

    steps, tokens: trained so far. losses: split -> the last loss, in nats a token. tokens_per_second: the median over
    the run. evaluations: `TASK METRIC` -> value, of the last step at which each was measured. about: `run.json` without
    the command, which may hold a database's password.
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
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingPoint:
    """A point of a training's curve. seconds: of training until then, by the measured tokens per second."""

    training: int
    step: int
    tokens: int
    seconds: float | None
    value: float


@waited
def record(store: Store, run_folder: str | Path) -> int:
    """Writes a run's folder into the ledger, or brings the ledger up to it, and returns the training's number there.

    Reads `run.json`, and `metrics.jsonl` and `evaluations.json` if there are such. Of several values of a metric at a
    step the last counts; a value that is not finite is not recorded. Doing it again changes nothing.

    Raises `InputError` for a folder that is no run, and for a file that cannot be read, with its line.
    """
    folder = Path(run_folder)
    about = _json(folder / RUN)
    metrics = _metrics(folder / METRICS)
    if (folder / EVALUATIONS).is_file():
        metrics |= _evaluations(folder / EVALUATIONS)
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
        _write(session, training.id, metrics)
        return training.id


@waited
def add_evaluations(store: Store, run: str, found: Sequence[Mapping[str, Any]]) -> bool:
    """Adds evaluations, each with step, task, metric and value, to the training of a run's id. False without such."""
    metrics = {_evaluation(row): float(row["value"]) for row in found if math.isfinite(row["value"])}
    with store._writing() as session:
        training = session.scalar(select(Training.id).where(Training.run == run))
        if training is not None:
            _write(session, training, metrics)
    return training is not None


@waited
def trainings(store: Ledger, study: Study | None = None) -> list[TrainingRow]:
    """The trainings of a study, or all of them, in the order of their start.

    A study's trainings name its address. Where one names the trial that was exported, too, and the ledger holds this
    trial, it belongs to the studies that have the trial: there may be several at one address.
    """
    chosen = select(Training).order_by(Training.started_at, Training.id)
    if study is not None:
        chosen = chosen.where(Training.study == study.address)
    with store._reading() as session:
        found = list(session.scalars(chosen))
        if study is not None:
            found = [training for training in found if _belongs(session, training, study)]
        return [_row(session, training) for training in found]


@waited
def measured(store: Ledger) -> list[tuple[str, str]]:
    """The (split, metric) of which there are curves, without what `platform eval` measured."""
    rows = select(TrainingMetric.split, TrainingMetric.name).distinct().where(TrainingMetric.split != EVALUATION)
    with store._reading() as session:
        return sorted((split, name) for split, name in session.execute(rows))


@waited
def curves(store: Ledger, ids: Sequence[int], split: str, name: str, *, max_points: int = 2000) -> list[TrainingPoint]:
    """The curves of a metric, of each training thinned to at most `max_points`, of which the last is its last."""
    points = []
    with store._reading() as session:
        for training in session.scalars(select(Training).where(Training.id.in_(list(ids))).order_by(Training.id)):
            values = _series(session, training.id, split, name)
            clock = _clock(_series(session, training.id, "train", SPEED), training.tokens_per_step)
            every = max(1, math.ceil(len(values) / max_points))
            for step, value in values[::-1][::every][::-1]:
                seconds = _at(clock, step)
                points.append(TrainingPoint(training.id, step, step * training.tokens_per_step, seconds, value))
    return points


def _facts(folder: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    try:
        batch = about["recipe"]["batch"]
        started = about["started"]
        began = datetime.fromisoformat(started) if isinstance(started, str) else datetime.fromtimestamp(started, UTC)
        return {
            "run": str(about["id"]),
            "name": folder.resolve().name,
            "study": about.get("study"),
            "arm": about.get("arm"),
            "rule": str(about["rule"]),
            "parameters": about.get("parameters"),
            "tokens_per_step": int(batch["sequences"]) * int(batch["length"]),
            "started_at": began if began.tzinfo else began.replace(tzinfo=UTC),
            "about": dict(about),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / RUN}: is not that of a run: {type(error).__name__}: {error}") from None


def _metrics(file: Path) -> Metrics:
    if not file.is_file():
        return {}
    found: Metrics = {}
    try:
        # Of a run that goes on, the last line may be half written.
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            value = math.nan if row["value"] is None else float(row["value"])
            found[str(row["split"]), str(row["name"]), int(row["step"])] = value
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}:{number}: is no metric: {type(error).__name__}: {error}") from None
    return {key: value for key, value in found.items() if math.isfinite(value)}


def _evaluations(file: Path) -> Metrics:
    try:
        return {
            _evaluation(row): float(row["value"])
            for row in _json(file)["evaluations"]
            if row["value"] is not None and math.isfinite(row["value"])
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file}: holds no evaluations: {type(error).__name__}: {error}") from None


def _evaluation(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return EVALUATION, f"{row['task']} {row['metric']}", int(row["step"] or 0)


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file.parent}: is no run of `platform train`: {file.name}: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{file}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{file}: is no JSON object")
    return found


def _write(session: Session, training_id: int, metrics: Metrics) -> None:
    """Adds metrics to a training's, and touches only the rows that differ."""
    table = TrainingMetric
    known = {
        (split, name, step): value
        for split, name, step, value in session.execute(
            select(table.split, table.name, table.step, table.value).where(table.training_id == training_id)
        )
    }
    stale = [key for key, value in metrics.items() if known.get(key, value) != value]
    for at in range(0, len(stale), ROWS_AT_ONCE):
        gone = tuple_(table.split, table.name, table.step).in_(stale[at : at + ROWS_AT_ONCE])
        session.execute(delete(table).where(table.training_id == training_id, gone))
    fresh = [
        {"training_id": training_id, "split": split, "name": name, "step": step, "value": value}
        for (split, name, step), value in metrics.items()
        if known.get((split, name, step)) != value
    ]
    if fresh:
        session.execute(insert(table), fresh)


def _belongs(session: Session, training: Training, study: Study) -> bool:
    key = (training.about.get("provenance") or {}).get("trial")
    if not isinstance(key, str):
        return True
    holders = select(Arm.study_id).join(ArmTrial).join(Trial).where(Trial.key == key)
    found = set(session.scalars(holders))
    return not found or study.id in found


def _row(session: Session, training: Training) -> TrainingRow:
    table = TrainingMetric
    last = (
        select(table.split, table.name, func.max(table.step).label("step"))
        .where(table.training_id == training.id)
        .group_by(table.split, table.name)
        .subquery()
    )
    same = (table.split == last.c.split) & (table.name == last.c.name) & (table.step == last.c.step)
    rows = select(table.split, table.name, table.step, table.value).join(last, same)
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
        about={key: value for key, value in training.about.items() if key != "command"},
    )


def _series(session: Session, training_id: int, split: str, name: str) -> list[tuple[int, float]]:
    table = TrainingMetric
    rows = select(table.step, table.value).where(
        table.training_id == training_id, table.split == split, table.name == name
    )
    return [(step, value) for step, value in session.execute(rows.order_by(table.step))]


def _clock(speeds: list[tuple[int, float]], tokens_per_step: int) -> list[tuple[int, float]]:
    """(step, seconds of training until then), from the tokens per second up to each step."""
    clock = [(0, 0.0)]
    for step, speed in speeds:
        before, seconds = clock[-1]
        clock.append((step, seconds + (step - before) * tokens_per_step / speed if speed else seconds))
    return clock


def _at(clock: list[tuple[int, float]], step: int) -> float | None:
    """The seconds at a step, on the line through the nearest two points; None where no speed is known."""
    segment = None
    for segment in pairwise(clock):
        if step <= segment[1][0]:
            break
    if segment is None:
        return None
    (before, early), (after, late) = segment
    return early + (late - early) * (step - before) / (after - before) if after > before else late
