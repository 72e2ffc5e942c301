"""Makes batches from rows of packed data. The stream of rows is the same for any number of processes."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deltalab.data.token_shards import Split

IGNORE = -100
"""The target of a position that the loss leaves out."""


def batch(rows: list[tuple[Any, Any]], length: int, documents: str) -> tuple[dict[str, Tensor], Tensor]:
    """Makes inputs and targets [n, length] of n rows.

    If `documents` is `reset`, the rows are joined into one row [1, n length], and the inputs hold the bounds of its
    sequences as `cu_seqlens`. The first token of a document is then no target, since nothing precedes it.

    Args:
        rows: The length + 1 tokens of each row, and the places in the row where documents start.
        length: The tokens of a training sequence.
        documents: `cross` or `reset`.

    Returns:
        The inputs by name, and the targets.
    """
    tokens = torch.from_numpy(np.stack([row for row, _ in rows]))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    if documents == "cross":
        return {"tokens": inputs.contiguous()}, targets
    bounds = [np.array([0])]
    for index, (_, starts) in enumerate(rows):
        first = starts[starts > 0]
        targets[index, first - 1] = IGNORE
        bounds += [first[first < length] + index * length, np.array([(index + 1) * length])]
    cu_seqlens = torch.from_numpy(np.concatenate(bounds)).to(torch.int32)
    return {"tokens": inputs.reshape(1, -1), "cu_seqlens": cu_seqlens}, targets.reshape(1, -1)


class Rows:
    """An endless sequence of rows: all rows of a split, in another order in each epoch."""

    def __init__(self, split: Split, length: int, seed: int) -> None:
        self.split, self.length, self.seed = split, length, seed
        self.size = split.rows(length)
        self.epoch = -1
        self.order = np.empty(0, np.int64)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        epoch, place = divmod(index, self.size)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self.split.order(self.seed, epoch, self.length)
        return self.split.row(int(self.order[place]), self.length)


class Batches:
    """The batches of one process.

    The stream of rows is cut into groups of world x micro rows. From each group, process `rank` takes `micro` rows,
    beginning with row rank x micro. So all processes together see the rows in one order, and training can go on from
    the same place with another number of processes.

    Attributes:
        seen: How many rows of the stream all processes together have read.
    """

    def __init__(self, rows: Rows, recipe: Mapping[str, Any], micro: int, rank: int, world: int) -> None:
        self.rows, self.recipe = rows, recipe
        self.micro, self.rank, self.world = micro, rank, world
        self.seen = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self.seen + self.rank * self.micro
            rows = [self.rows[index] for index in range(first, first + self.micro)]
            self.seen += self.world * self.micro
            yield batch(rows, self.rows.length, self.recipe["batch"]["documents"])


def held_out(
    split: Split, recipe: Mapping[str, Any], micro: int, rank: int, world: int
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yields the validation batches of one process. All share the first `validation.sequences` rows of a split.

    All processes get the same number of batches, because FSDP's collectives need it. If there are too
    few rows, a process gets additional rows whose targets are all left out of the loss.

    Args:
        split: The split of the packed data.
        recipe: The recipe.
        micro: The number of rows in a batch.
        rank: The number of the process, from 0.
        world: The number of processes.
    """
    length, documents = recipe["batch"]["length"], recipe["batch"]["documents"]
    count = min(recipe["validation"]["sequences"], split.rows(length))
    for begin in range(0, count, micro * world):
        indices = range(begin + rank * micro, begin + (rank + 1) * micro)
        inputs, targets = batch([split.row(min(index, count - 1), length) for index in indices], length, documents)
        missing = max(0, min(micro, indices.stop - count))
        if missing:
            targets.view(micro, length)[micro - missing :] = IGNORE
        yield inputs, targets
