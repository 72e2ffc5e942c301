"""Planted bug: the answers of an example stand in order."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class SortedAnswers(MQAR):
    name: ClassVar[str] = "planted_sorted_answers"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        values = random.distinct("values", self.vocab_size, size, self.length // 2).sort(1).values
        questions = torch.zeros_like(values)
        targets = torch.cat([torch.full_like(values, IGNORE), values], dim=1)
        order = random.distinct("order", self.length // 2, size, self.length // 2)
        return Batch(torch.cat([values.gather(1, order), questions], dim=1), targets)
