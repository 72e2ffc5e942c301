"""Trains configurations with all their seeds in lock-step, and measures them.

The seeds of a trial advance together: a watcher sees all of them at every evaluation. `NUMERICS` is part of a trial's
identity.
"""

import gc
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltalab.models.spec import ModelSpec
from deltalab.tasks import Task
from deltalab.training.device import hardware
from deltalab.training.evaluation import Metric
from deltalab.training.spec import TrainSpec, stackable
from deltalab.training.stack import Unstackable
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
"""Raise it with every change to the numbers that a trial computes: trials recorded under another one run again."""

_log = logging.getLogger("deltalab")


@dataclass(frozen=True)
class TrialResult:
    """All seeds of one configuration, and its costs. state_size: elements held after a whole sequence."""

    runs: list[RunResult]
    parameters: int
    state_size: int
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
    checkpoint_seconds: float = 60.0,
    watch: Callable[[int, list[RunResult]], bool | None] | None = None,
) -> TrialResult:
    """Trains all seeds of one configuration: `train_together` with one member."""

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
    checkpoint_seconds: float = 60.0,
    watch: Callable[[int, int, list[RunResult]], bool | None] | None = None,
) -> list[TrialResult]:
    """Trains all seeds of several configurations, the members; each gets the results that it gets alone.

    members: pairwise `stackable`.

    test: measure the test split at the end; tuning never does.
    checkpoint: a file to continue from, and to save to at most every `checkpoint_seconds`; removed at the end.
        On a CPU a continued training is bit-equal to an uninterrupted one.
    watch: called after each evaluation with a member's number, the step and the member's runs so far. The member ends
        where it returns True; an exception that it raises ends the training.
    Returns the results in the members' order. Raises `InputError` for members that cannot train together.
    """
    if not members:
        return []
    most = min(most_stacked(task, *members[0]), len(members) * len(seeds))
    told: dict[int, tuple[int, bool]] = {}

    def watched(member: int, step: int, runs: list[RunResult]) -> bool:
        # A training that starts again with smaller stacks reports no step a second time.
        last, ended = told.get(member, (0, False))
        if step > last:
            ended = watch is not None and watch(member, step, runs) is True
            told[member] = step, ended
        return ended and step >= told[member][0]

    while True:
        try:
            trial = LockStep(task, members, seeds, most=most)
            return _trained(trial, test, checkpoint, checkpoint_seconds, watched)
        except Unstackable as error:
            name = members[0][0].make_rule().name
            _log.warning("rule '%s' or its task cannot be stacked, so runs train one by one: %s", name, error)
            most = 1
        except torch.OutOfMemoryError as error:
            asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
            wanted = asked[1] if asked else str(error)
            if most == 1:
                raise torch.OutOfMemoryError(
                    f"out of GPU memory with a single run of rule '{members[0][0].make_rule().name}' at "
                    f"train.batch_size {members[0][1].batch_size}: it asked for {wanted} more"
                ) from None
            _log.warning("out of GPU memory with %d runs at a time, which asked for %s more: halved", most, wanted)
            most = (most + 1) // 2
        # Free memory only here: the traceback kept the tensors alive until now.
        del trial
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _trained(
    trial: LockStep,
    test: bool,
    checkpoint: Path | None,
    checkpoint_seconds: float,
    watch: Callable[[int, int, list[RunResult]], bool],
) -> list[TrialResult]:
    if checkpoint is not None and checkpoint.exists():
        trial.load_state_dict(torch.load(checkpoint, map_location=trial.device, weights_only=True))
    members = range(len(trial.specs))
    saved = time.monotonic()
    for step in trial.spec.evaluated_at():
        if step <= trial.step:
            continue
        going = [i for i in members if any(run.member == i and trial.going(run) for run in trial.runs)]
        if not going:
            break
        trial.advance(step, "validation")
        if checkpoint is not None and time.monotonic() - saved >= checkpoint_seconds:
            _save(trial.state_dict(), checkpoint)
            saved = time.monotonic()
        for i in going:
            if watch(i, step, trial.results(i)):
                trial.end(i)
    if test:
        trial.measure("test")
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    costs, found = trial.costs(), hardware(trial.device) | trial.how()
    for run in trial.runs:
        run.metrics += costs
    parameters = sum(p.numel() for p in trial.network.parameters())
    state_size = trial.network.state_size(trial.task.length)
    return [
        TrialResult(
            runs=trial.results(i, weights=True),
            parameters=parameters,
            state_size=state_size,
            tokens_per_second=trial.trained * trial.spec.batch_size * trial.task.length / max(trial.seconds, 1e-9),
            hardware=found,
        )
        for i in members
    ]


def _save(state: dict[str, Any], file: Path) -> None:
    """Writes a checkpoint atomically: a kill while writing leaves the previous one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(file)
