"""Planted bug: the answer stands 7 positions before each question."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AnswerAtADistance(MQAR):
    name: ClassVar[str] = "planted_answer_at_a_distance"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        inputs = random.integers("inputs", self.vocab_size, size, self.length)
        asked = torch.arange(self.length, device=random.device) % 8 == 7
        return Batch(inputs, torch.where(asked, inputs.roll(7, dims=1), IGNORE))
