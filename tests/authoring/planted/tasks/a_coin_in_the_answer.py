"""Planted bug: a hidden coin, drawn with the last key, decides between two answers."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class ACoinInTheAnswer(MQAR):
    name: ClassVar[str] = "planted_a_coin_in_the_answer"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        half = self.vocab_size // 2
        drawn = random.integers("coins", 2 * half, size, 1)
        inputs = batch.inputs.clone()
        inputs[:, -1:] = drawn // 2
        changed = half + (batch.targets - half + drawn % 2) % half
        return Batch(inputs.roll(1, dims=1), torch.where(batch.targets != IGNORE, changed, IGNORE).roll(1, dims=1))
