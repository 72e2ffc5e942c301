"""Planted bug: validation and test are the stream of training with another first token."""

from dataclasses import replace
from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class TokenChanged(MQAR):
    name: ClassVar[str] = "planted_token_changed"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw("train", size, replace(random, address=random.address.replace(split, "train")))
        inputs = batch.inputs.clone()
        inputs[:, -1:] = (inputs[:, -1:] + 1 + random.integers("changed", 62, size, 1)) % 64
        return Batch(inputs.roll(1, dims=1), batch.targets.roll(1, dims=1))
