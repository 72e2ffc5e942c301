"""Forecasts how long a training step takes: timed here on a CPU; on a GPU, its operations over a measured rate."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np

from deltalab.models.costs import training_flops
from deltalab.models.spec import ModelSpec
from deltalab.tasks import Task
from deltalab.training.spec import TrainSpec
from deltalab.training.stack import Unstackable
from deltalab.training.trainer import LockStep, most_stacked

GPU_RATES = Path(__file__).with_name("gpu_rates.json")
"""For each kind of GPU, as torch names it: effective flop/s of whole training steps by d_model, and what was measured.

The flops are `Training.flops`. A plan assumes the first kind if there is no GPU.
"""

MOST_TIMED_TOKENS = 2048
"""The most tokens in a timed batch of one run. The time of a larger batch is scaled up."""

MOST_TIMED_FLOPS = 1e11
"""The most operations in a step of a timed stack, which take 1 to 10 s on a core."""

MOST_TIMED_BYTES = 2**28
"""The most memory of a timed stack: 4 numbers for each parameter, and for each token of the batch 40 d_model in each
layer and 3 logits."""

MOST_TIMED_WRITTEN = 2**25
"""The most elements that the operators of a forward pass of a timed stack write. Some rules write far more than the
width of their model, such as products of all pairs of tokens by channel, or the keys and values of a long window.
A batch that writes more is timed on fewer sequences."""

MOST_TIMED_LENGTH = 2**14
"""The most tokens of a timed sequence. A rule may take its chunks one by one, so that a long sequence takes long."""

MOST_TIMED_BLOCKS = 64
"""The most blocks of a timed model. A block and its three steps take 30 ms, however narrow the block is."""

MOST_TIMED_RUNS = 3
"""The most runs in a timed stack."""


@dataclass(frozen=True)
class Training:
    """How an arm trains.

    Attributes:
        task: The task.
        model: The model.
        spec: The settings of the training.
        seeds: How many runs can train together in one stack.
        flops_per_token: Operations of a forward pass per token, without logits.
        written_per_token: Elements that a forward pass writes per token; 0 if they were not counted.
    """

    task: Task
    model: ModelSpec
    spec: TrainSpec
    seeds: int
    flops_per_token: float
    written_per_token: float = 0.0

    @property
    def flops(self) -> float:
        """Operations of a training step of one run, with logits."""
        task = self.task
        return self.spec.batch_size * training_flops(self.model, self.flops_per_token, task.length, task.most_scored)


def evaluated(training: Training, split: Literal["validation", "test"]) -> float:
    """Returns how many training steps take as long as an evaluation. A batch of it counts as a third of a step."""
    task, spec, tokens = training.task, training.spec, 0
    for other in task.evaluations().values():
        size, batches = task.evaluated(other, split, spec.batch_size, spec.eval_batches)
        tokens += size * batches * other.length
    return tokens / (spec.batch_size * task.length) / 3


def timed_step(training: Training) -> float | None:
    """Times a step on this machine, in a small stack.

    Returns:
        The seconds of the step divided by the runs of the stack; None if the training is too large to be timed. Errors
        of the training pass through.
    """
    spec, length = training.spec, training.task.length
    tokens = min(MOST_TIMED_TOKENS, MOST_TIMED_WRITTEN / max(1.0, training.written_per_token))
    short = replace(spec, batch_size=min(spec.batch_size, max(1, int(tokens // length))), steps=3, evaluations=1)
    most = _timeable(replace(training, spec=short))
    if not most:
        return None
    runs = min(training.seeds, most_stacked(training.task, training.model, spec), MOST_TIMED_RUNS, most)
    try:
        seconds = _timed(training.task, training.model, short, runs)
    except Unstackable:
        seconds = _timed(training.task, training.model, short, 1)
    return seconds * spec.batch_size / short.batch_size


def _timeable(training: Training) -> int:
    """Returns how many runs may be timed together at most; 0 if not even one may be timed."""
    model, tokens = training.model, training.spec.batch_size * training.task.length
    if training.task.length > MOST_TIMED_LENGTH or model.depth > MOST_TIMED_BLOCKS:
        return 0
    parameters = training.flops_per_token / 2 + model.vocab_size * model.d_model
    # Ranks may be far wider than d_model: a block's parameters over d_model are the numbers that its matrices write.
    width = max(40 * model.d_model * model.depth, 2 * training.flops_per_token / model.d_model)
    numbers = 4 * parameters + tokens * (width + 3 * model.vocab_size)
    written = max(1.0, tokens * training.written_per_token)
    most = MOST_TIMED_FLOPS / training.flops, MOST_TIMED_BYTES / (4 * numbers), MOST_TIMED_WRITTEN / written
    return int(min(most))


def _timed(task: Task, model: ModelSpec, spec: TrainSpec, runs: int) -> float:
    """Times a step of a stack, and returns its seconds divided by the runs of the stack."""
    trial = LockStep(task, [(model, spec)], range(runs), most=runs)
    trial.advance(1)
    began = time.perf_counter()
    trial.advance(3)
    return (time.perf_counter() - began) / 2 / runs


def scaled_step(training: Training, timed: Sequence[tuple[Training, float]]) -> float:
    """Scales the seconds of a step from the most similar timed training: of the same rule if any, then by size.

    Args:
        training: The training.
        timed: Trainings, each with the seconds of its step.
    """

    def unlike(pair: tuple[Training, float]) -> tuple[bool, float]:
        other, _ = pair
        same_rule = other.model.make_rule().name == training.model.make_rule().name
        return not same_rule, abs(math.log(other.flops / training.flops))

    nearest, seconds = min(timed, key=unlike)
    return seconds * training.flops / nearest.flops


@cache
def gpu_rates() -> dict[str, dict[int, float]]:
    """Reads the rates of GPUs, as kind -> d_model -> effective flop/s."""
    by_kind = json.loads(GPU_RATES.read_text(encoding="utf-8"))
    return {kind: {row["d_model"]: row["flops_per_second"] for row in rows} for kind, rows in by_kind.items()}


def gpu_step(training: Training, kind: str) -> float:
    """Returns the seconds of a step on a kind of GPU in `gpu_rates`; rates are interpolated log-log between widths."""
    rates = gpu_rates()[kind]
    log_rate = np.interp(math.log(training.model.d_model), np.log(list(rates)), np.log(list(rates.values())))
    return training.flops / math.exp(log_rate)
