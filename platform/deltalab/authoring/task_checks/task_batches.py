"""The batches that the checks of a task look at, and small functions that measure batches."""

import math

import torch
from torch import Tensor

from deltalab.tasks.task import IGNORE, Batch, Task

SIZE, STEPS = 64, 8
"""The number of examples in a batch, and the number of batches of a split."""
JUDGED = ("validation", "test")
"""The splits of evaluation."""
ENOUGH = 2048
"""The number of scored positions from which a metric is estimated."""


def drawn(task: Task, split: str) -> list[Task]:
    """Returns the tasks that draw a split: the task itself for training, else the tasks that it is evaluated on."""
    return [task] if split == "train" else [*task.evaluations().values()]


def batches(task: Task, split: str) -> list[tuple[Task, Batch]]:
    """Returns the first `STEPS` batches of a split, each with the task that drew it."""
    return [(member, member.batch(split, SIZE, 0, step)) for member in drawn(task, split) for step in range(STEPS)]


def judged(task: Task, split: str, seed: int = 0) -> list[tuple[Task, Batch]]:
    """Returns batches of a split with `ENOUGH` scored positions, each with the task that drew it.

    The task is the evaluation without a label. If every evaluation has a label, all of them are taken.
    """
    evaluations = task.evaluations()
    pairs = []
    for member in [evaluations[""]] if "" in evaluations else evaluations.values():
        positions = 0
        for step in range(STEPS):
            if positions < ENOUGH:
                pairs.append((member, member.batch(split, SIZE, seed, step)))
                positions += scored_in(pairs[-1][1])
    return pairs


def scored_in(batch: Batch) -> int:
    """Returns the number of scored positions in a batch."""
    return int((batch.targets != IGNORE).sum())


def last_scored(batch: Batch) -> Tensor:
    """Returns the last scored position of each row, [B], or -1 for a row without any."""
    place = torch.arange(batch.targets.shape[1]).expand_as(batch.targets)
    return torch.where(batch.targets != IGNORE, place, -1).amax(1)


def different(a: Batch, b: Batch) -> float:
    """Returns the number of tokens, inputs and targets, in which two batches differ."""
    if a.inputs.shape != b.inputs.shape:
        return math.inf
    return float((a.inputs != b.inputs).sum() + (a.targets != b.targets).sum())


def near_uniform(batch: Batch, vocab_size: int, seed: int) -> Tensor:
    """Returns logits that are almost equal, so that the largest one is a random guess."""
    return 1e-4 * torch.rand(scored_in(batch), vocab_size, generator=torch.Generator().manual_seed(seed))


def certain(answers: Tensor, vocab_size: int) -> Tensor:
    """Returns logits [N, vocab_size] of a model that is sure of the answers [N]."""
    return torch.full((len(answers), vocab_size), -1e4).scatter_(1, answers[:, None], 0.0)


def mean(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Returns the metric over several batches, from the pair (total, count) of each batch."""
    count = sum(float(count) for _, count in pairs)
    return sum(float(total) for total, _ in pairs) / count if count else math.nan
