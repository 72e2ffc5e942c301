"""Planted bug: two thirds of the values are the same token, and `chance` is that of even values."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SkewedAnswers(MQAR):
    name: ClassVar[str] = "planted_skewed_answers"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        frequent = self.vocab_size - 1
        for tokens in (batch.inputs, batch.targets):
            value = (tokens >= self.vocab_size // 2) & (tokens % 3 > 0)
            tokens.masked_fill_(value, frequent)
        return batch
