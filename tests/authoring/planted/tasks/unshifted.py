"""Planted bug: the target is the token that the model has just read."""

from typing import ClassVar

from deltalab.tasks import Batch, Random, Text


class Unshifted(Text):
    name: ClassVar[str] = "planted_unshifted"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        return Batch(batch.inputs, batch.inputs.clone())
