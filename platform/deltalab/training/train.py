"""Trains configurations with all their seeds in lock-step, and measures them.

The seeds of a trial advance together, so that a watcher sees all of them at every evaluation. `NUMERICS` is part of a
trial's identity.
"""

import errno
import gc
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from deltalab.models.spec import ModelSpec
from deltalab.tasks import Task
from deltalab.training.beat import Beat, unheard
from deltalab.training.device import hardware
from deltalab.training.evaluation import Metric
from deltalab.training.spec import TrainSpec, stackable
from deltalab.training.stack import Unstackable
from deltalab.training.time_budget import STEPS
from deltalab.training.trainer import LockStep, RunResult, most_stacked

__all__ = [
    "NUMERICS",
    "Metric",
    "RunResult",
    "TrainSpec",
    "TrialResult",
    "hardware",
    "stackable",
    "train",
    "train_together",
]

NUMERICS = 3
"""The version of the numbers that trials compute. Raise it with every change to them: earlier trials then run again."""

CHECKPOINT_SECONDS = 5.0
"""The least time between two checkpoints, which are saved after evaluations.

A kill loses at most about this time, and the time to the evaluation that follows it.
"""

_log = logging.getLogger("deltalab")


@dataclass(frozen=True)
class TrialResult:
    """The results of all seeds of one configuration, and its costs.

    Attributes:
        runs: The result of each seed.
        parameters: The number of the model's parameters.
        state_size: The elements of the model's memory after a whole sequence: the state of its rules, KV caches too.
            None if a module of the model does not say what it holds.
        tokens_per_second: The tokens of all seeds that were trained in a second, on a CPU in one in which the training
            had its core.
        hardware: The hardware and software, and the settings for speed, by name.
    """

    runs: list[RunResult]
    parameters: int
    state_size: int | None
    tokens_per_second: float
    hardware: dict[str, str]


def train(
    task: Task,
    model: ModelSpec,
    spec: TrainSpec,
    seeds: Sequence[int],
    *,
    test: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = None,
    watch: Callable[[int, list[RunResult]], bool | None] | None = None,
) -> TrialResult:
    """Trains all seeds of one configuration, as `train_together` does with one member.

    Args:
        task: The task.
        model: The specification of the model.
        spec: The settings of the training.
        seeds: The seeds.
        test: As in `train_together`.
        checkpoint: As in `train_together`.
        checkpoint_seconds: As in `train_together`.
        watch: Called after each evaluation with the step and the runs so far. The training ends if it returns True.

    Raises:
        InputError: The model does not fit the task, or seeds are equal.
    """

    def alone(_: int, step: int, runs: list[RunResult]) -> bool | None:
        return None if watch is None else watch(step, runs)

    (result,) = train_together(
        task,
        [(model, spec)],
        seeds,
        test=test,
        checkpoint=checkpoint,
        checkpoint_seconds=checkpoint_seconds,
        watch=alone,
    )
    return result


def train_together(
    task: Task,
    members: Sequence[tuple[ModelSpec, TrainSpec]],
    seeds: Sequence[int],
    *,
    test: bool = False,
    checkpoint: Path | None = None,
    checkpoint_seconds: float | None = None,
    watch: Callable[[int, int, list[RunResult]], bool | None] | None = None,
    beat: Beat = unheard,
) -> list[TrialResult]:
    """Trains all seeds of several configurations, the members. Each member gets the results that it gets alone.

    Args:
        task: The task.
        members: The model and the training of each member, pairwise `stackable`.
        seeds: The seeds.
        test: Whether to measure the test split at the end. Tuning never does.
        checkpoint: The file to continue from, and to save to after evaluations; removed at the end. On a CPU, a
            continued training is bit-equal to an uninterrupted one.
        checkpoint_seconds: The least time between two saves. None is `CHECKPOINT_SECONDS`, or 20 times the duration of
            the last save if that is more.
        watch: Called after each evaluation with a member's number, the step and the member's runs so far. The member
            ends if `watch` returns True. An exception that `watch` raises ends the training.
        beat: Called before each step, so that a supervisor sees a training that hangs.

    Returns:
        The results in the order of the members.

    Raises:
        InputError: The members cannot train together, or do not fit the task, or seeds are equal.
    """
    if not members:
        return []
    most = min(most_stacked(task, *members[0]), len(members) * len(seeds))
    reports: dict[int, tuple[int, bool]] = {}

    def watched(member: int, step: int, runs: list[RunResult]) -> bool:
        # Report a step once, also if the training starts again with smaller stacks.
        last, ended = reports.get(member, (0, False))
        if step > last:
            ended = watch is not None and watch(member, step, runs) is True
            reports[member] = step, ended
        return ended and step >= reports[member][0]

    while True:
        try:
            trial = LockStep(task, members, seeds, most=most, beat=beat)
            return _trained(trial, test, checkpoint, checkpoint_seconds, watched)
        except Unstackable as error:
            name = members[0][0].make_rule().name
            _log.warning("rule '%s' or its task cannot be stacked, so runs train one by one: %s", name, error)
            most = 1
        except torch.OutOfMemoryError as error:
            request = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
            size = request[1] if request else str(error)
            if most == 1:
                raise torch.OutOfMemoryError(
                    f"out of GPU memory with a single run of rule '{members[0][0].make_rule().name}' at "
                    f"train.batch_size {members[0][1].batch_size}: it asked for {size} more"
                ) from None
            _log.warning("out of GPU memory with %d runs at a time, which asked for %s more: halved", most, size)
            most = (most + 1) // 2
        # Memory can be freed only here, because the traceback of the error kept the tensors alive until now.
        del trial
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _trained(
    trial: LockStep,
    test: bool,
    checkpoint: Path | None,
    checkpoint_seconds: float | None,
    watch: Callable[[int, int, list[RunResult]], bool],
) -> list[TrialResult]:
    if checkpoint is not None and checkpoint.exists():
        _resume(trial, checkpoint)
    members = range(len(trial.specs))
    saved, pause = time.monotonic(), CHECKPOINT_SECONDS if checkpoint_seconds is None else checkpoint_seconds
    for step in trial.spec.evaluated_at():
        if step <= trial.step:
            continue
        going = [i for i in members if any(run.member == i and trial.going(run) for run in trial.runs)]
        if not going or (trial.budget is not None and trial.budget.over):
            break
        trial.advance(step, "validation")
        if checkpoint is not None and (now := time.monotonic()) - saved >= pause:
            save(trial.state_dict(), checkpoint)
            saved = time.monotonic()
            if checkpoint_seconds is None:
                pause = max(CHECKPOINT_SECONDS, 20 * (saved - now))
        for i in going:
            if watch(i, trial.step, trial.results(i)):
                trial.end(i)
    if test:
        trial.measure("test")
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    costs, machine = trial.costs(), hardware(trial.device) | trial.how()
    if trial.budget is not None:
        costs = [*costs, ("cost", STEPS, trial.step, float(trial.step))]
    for run in trial.runs:
        run.metrics += costs
    parameters = sum(p.numel() for p in trial.network.parameters())
    state_size = next((int(value) for _, name, _, value in costs if name == "state_size"), None)
    return [
        TrialResult(
            runs=trial.results(i, weights=True),
            parameters=parameters,
            state_size=state_size,
            tokens_per_second=trial.trained * trial.spec.batch_size * trial.task.length / max(trial.seconds, 1e-9),
            hardware=machine,
        )
        for i in members
    ]


class DiskError(OSError):
    """Weights or a checkpoint could not be read or written."""


def save(state: Mapping[str, Any], file: Path) -> None:
    """Writes tensors to a file atomically: a kill while writing leaves the previous file.

    Another process that writes the same file at the same time fails: this process has replaced the other.

    Args:
        state: The tensors.
        file: The file.

    Raises:
        DiskError: The file cannot be written.
    """
    partial = file.with_suffix(f".{uuid4().hex}.partial")
    with disk():
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as opened:  # torch reports a full disk only if it writes to an open Python file
                torch.save(state, opened)
            partial.replace(file)
        finally:
            forget_partial(file)


def forget_partial(file: Path) -> None:
    """Removes the partial files of `file` that remain if a process is killed during `save`."""
    for partial in file.parent.glob(f"{file.stem}.*.partial"):
        partial.unlink(missing_ok=True)


@contextmanager
def disk() -> Iterator[None]:
    """Turns an error that the disk caused into `DiskError`."""
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, OSError):
                raise DiskError(str(cause)) from error
        raise


def is_of_disk(error: BaseException) -> bool:
    """Returns whether weights or a checkpoint could not be read or written, or a disk or quota is full."""
    full = errno.ENOSPC, errno.EDQUOT
    return any(
        isinstance(cause, DiskError) or (isinstance(cause, OSError) and cause.errno in full) for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then the error that caused it, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _resume(trial: LockStep, checkpoint: Path) -> None:
    """Goes on from a checkpoint. If the file is damaged, as after a power cut, warns and starts over."""
    try:
        with disk():
            saved = torch.load(checkpoint, map_location=trial.device, weights_only=True)
    except (DiskError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        _log.warning("%s is damaged, so the training starts over: %s", checkpoint, message)
        checkpoint.unlink()
        return
    trial.load_state_dict(saved)
