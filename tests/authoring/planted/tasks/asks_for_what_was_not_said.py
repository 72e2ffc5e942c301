"""Planted bug: one of the keys that are asked for does not stand in the context."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class AsksForWhatWasNotSaid(MQAR):
    name: ClassVar[str] = "planted_asks_for_what_was_not_said"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        batch.inputs[:, :2] = 0
        return batch
