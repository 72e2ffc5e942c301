"""Planted bug: the value that is asked for at a position is the same in all examples."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AnswersByPlace(MQAR):
    name: ClassVar[str] = "planted_answers_by_place"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        place = torch.arange(self.length, device=random.device) % (self.vocab_size // 2) + self.vocab_size // 2
        batch.targets.copy_(torch.where(batch.targets != IGNORE, place, IGNORE))
        return batch
