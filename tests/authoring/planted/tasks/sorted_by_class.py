"""Planted bug: the examples of a batch stand in the order of their answers."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class SortedByClass(MQAR):
    name: ClassVar[str] = "planted_sorted_by_class"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half = self.vocab_size // 2
        answers = half + random.integers("answers", half, size, 1).sort(0).values
        inputs = 1 + random.integers("inputs", half - 1, size, self.length)
        place = torch.arange(self.length, device=random.device)
        at = random.integers("at", self.length - 8, size, 1)
        return Batch(torch.where(place == at, answers, inputs), torch.where(place == self.length - 1, answers, IGNORE))
