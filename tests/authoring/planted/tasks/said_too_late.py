"""Planted bug: the first pair stands at the end, behind most of the queries."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SaidTooLate(MQAR):
    name: ClassVar[str] = "planted_said_too_late"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        batch.inputs[:, -2:] = batch.inputs[:, :2]
        batch.inputs[:, :2] = 0
        return batch
