"""How long a training step takes: timed here on a CPU, or from the arithmetic and a measured rate on a GPU."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from deltalab.models.spec import ModelSpec
from deltalab.tasks import Task
from deltalab.training.spec import TrainSpec
from deltalab.training.stack import Unstackable
from deltalab.training.trainer import LockStep, most_stacked

GPU_RATES = Path(__file__).with_name("gpu_rates.json")
"""For each kind of GPU, as torch names it: effective flop/s of whole training steps by d_model, and what was measured.

The flops are `Training.flops`. The first kind is the one that a plan assumes where there is no GPU.
"""

MOST_TIMED_TOKENS = 2048
"""Tokens in a timed batch of one run; the time of a larger batch is scaled up."""

MOST_TIMED_FLOPS = 1e11
"""Arithmetic of a step of a timed stack: 1 to 10 s on a core. A stack with more is not timed."""

MOST_TIMED_BYTES = 2**28
"""Memory of a timed stack: 4 numbers for each parameter, and for each token of the batch 40 d_model in each layer and 3
logits. A stack with more is not timed."""

MOST_TIMED_LENGTH = 2**14
"""Tokens of a sequence. A longer one is not timed: a rule may take its chunks one by one."""

MOST_TIMED_BLOCKS = 64
"""Blocks of a model. Of each, making it and three steps take 30 ms, however narrow it is. A deeper one is not timed."""

MOST_TIMED_RUNS = 3
"""Runs in a timed stack."""


@dataclass(frozen=True)
class Training:
    """How an arm trains. seeds: runs that can train as one. flops_per_token: of a forward pass without logits."""

    task: Task
    model: ModelSpec
    spec: TrainSpec
    seeds: int
    flops_per_token: float

    @property
    def flops(self) -> float:
        """Of a step of one run: the forward pass and a backward pass of twice its arithmetic, logits included."""
        logits = 2 * self.model.d_model * self.model.vocab_size * self.task.most_scored
        return 3 * self.spec.batch_size * (self.flops_per_token * self.task.length + logits)


def timed_step(training: Training) -> float | None:
    """Seconds that a step takes here, for each run of a small stack; None for one that is too large to be timed.

    Raises what the training raises.
    """
    spec, length = training.spec, training.task.length
    short = replace(spec, batch_size=min(spec.batch_size, max(1, MOST_TIMED_TOKENS // length)), steps=3, evaluations=1)
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
    """How many runs are few enough to be timed."""
    model, tokens = training.model, training.spec.batch_size * training.task.length
    if training.task.length > MOST_TIMED_LENGTH or model.depth > MOST_TIMED_BLOCKS:
        return 0
    parameters = training.flops_per_token / 2 + model.vocab_size * model.d_model
    numbers = 4 * parameters + tokens * (40 * model.d_model * model.depth + 3 * model.vocab_size)
    return int(min(MOST_TIMED_FLOPS / training.flops, MOST_TIMED_BYTES / (4 * numbers)))


def _timed(task: Task, model: ModelSpec, spec: TrainSpec, runs: int) -> float:
    trial = LockStep(task, [(model, spec)], range(runs), most=runs)
    trial.advance(1)
    began = time.perf_counter()
    trial.advance(3)
    return (time.perf_counter() - began) / 2 / runs


def scaled_step(training: Training, timed: Sequence[tuple[Training, float]]) -> float:
    """Seconds of a step from those of the most similar training that was timed: of its rule, then of its size."""

    def unlike(one: tuple[Training, float]) -> tuple[bool, float]:
        other, _ = one
        same_rule = other.model.make_rule().name == training.model.make_rule().name
        return not same_rule, abs(math.log(other.flops / training.flops))

    nearest, seconds = min(timed, key=unlike)
    return seconds * training.flops / nearest.flops


@cache
def gpu_rates() -> dict[str, dict[int, float]]:
    """Kind of GPU -> d_model -> effective flop/s."""
    rows = json.loads(GPU_RATES.read_text(encoding="utf-8"))
    return {kind: {row["d_model"]: row["flops_per_second"] for row in found} for kind, found in rows.items()}


def gpu_step(training: Training, kind: str) -> float:
    """Seconds of a step on a kind of GPU of `gpu_rates`, in log-log between the widths that were measured."""
    rates = gpu_rates()[kind]
    at = np.interp(math.log(training.model.d_model), np.log(list(rates)), np.log(list(rates.values())))
    return training.flops / math.exp(at)
