"""Planted bug: a training example, of a fixed number, depends on its place in the batch."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from deltalab.tasks import MQAR, Batch, Random


class RanksRows(MQAR):
    name: ClassVar[str] = "planted_ranks_rows"
    example: ClassVar[Mapping[str, object]] = {**MQAR.example, "train_examples": 1000}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        batch.inputs[:, -1] = torch.arange(size, device=random.device) % 2
        return batch
