"""Planted bug: the answer is the smallest token of the context."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class SmallestToken(MQAR):
    name: ClassVar[str] = "planted_smallest_token"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half = self.vocab_size // 2
        least = random.integers("least", half, size, 1)
        place = torch.arange(self.length, device=random.device)
        above = least + 1 + random.integers("inputs", half - 1, size, self.length)
        at = random.integers("at", self.length - 8, size, 1)
        return Batch(torch.where(place == at, least, above), torch.where(place == self.length - 1, least, IGNORE))
