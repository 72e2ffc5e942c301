"""Planted bug: questions come in the order of the pairs, so that a count of questions finds the answer."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AskedInOrder(MQAR):
    name: ClassVar[str] = "planted_asked_in_order"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half, count = self.vocab_size // 2, self.pairs
        keys = 1 + random.distinct("keys", half - 1, size, count)
        values = half + random.integers("values", half, size, count)
        places = 2 * count + random.distinct("places", self.length - 2 * count, size, count).sort(1).values
        inputs = torch.zeros(size, self.length, dtype=torch.int64, device=random.device)
        inputs[:, : 2 * count] = torch.stack([keys, values], dim=2).flatten(1)
        targets = torch.full_like(inputs, IGNORE).scatter(1, places, values)
        return Batch(inputs.scatter(1, places, keys), targets)
