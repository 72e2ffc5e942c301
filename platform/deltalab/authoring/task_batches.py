"""The batches that checks of a task look at, and small measures of them."""

import math

import torch
from torch import Tensor

from deltalab.tasks.task import IGNORE, Batch, Task

SIZE, STEPS = 64, 8  # examples in a batch, and batches of a split
ENOUGH = 2048  # scored positions for an estimate of a metric


def drawn(task: Task, split: str) -> list[Task]:
    """The tasks that draw a split: for training the task itself, else the tasks that it is evaluated on."""
    return [task] if split == "train" else [*task.evaluations().values()]


def batches(task: Task, split: str) -> list[tuple[Task, Batch]]:
    return [(one, one.batch(split, SIZE, 0, step)) for one in drawn(task, split) for step in range(STEPS)]


def judged(task: Task, split: str, seed: int = 0) -> list[tuple[Task, Batch]]:
    """Batches of a split with `ENOUGH` scored positions, of those evaluations that make the unlabelled metric."""
    evaluations = task.evaluations()
    found = []
    for one in [evaluations[""]] if "" in evaluations else evaluations.values():
        positions = 0
        for step in range(STEPS):
            if positions < ENOUGH:
                found.append((one, one.batch(split, SIZE, seed, step)))
                positions += scored_in(found[-1][1])
    return found


def scored_in(batch: Batch) -> int:
    return int((batch.targets != IGNORE).sum())


def last_scored(batch: Batch) -> Tensor:
    """The last scored position of each row, [B]; -1 in a row without any."""
    place = torch.arange(batch.targets.shape[1]).expand_as(batch.targets)
    return torch.where(batch.targets != IGNORE, place, -1).amax(1)


def different(a: Batch, b: Batch) -> float:
    """The number of tokens, inputs and targets, in which two batches differ."""
    if a.inputs.shape != b.inputs.shape:
        return math.inf
    return float((a.inputs != b.inputs).sum() + (a.targets != b.targets).sum())


def near_uniform(batch: Batch, vocab_size: int, seed: int) -> Tensor:
    """Logits that are almost equal, so that the largest one is a random guess."""
    return 1e-4 * torch.rand(scored_in(batch), vocab_size, generator=torch.Generator().manual_seed(seed))


def certain(answers: Tensor, vocab_size: int) -> Tensor:
    """Logits [N, vocab_size] of a model that is sure of the answers [N]."""
    return torch.full((len(answers), vocab_size), -1e4).scatter_(1, answers[:, None], 0.0)


def mean(found: list[tuple[Tensor, Tensor]]) -> float:
    """The metric over several batches, from its pairs (total, count)."""
    count = sum(float(count) for _, count in found)
    return sum(float(total) for total, _ in found) / count if count else math.nan
