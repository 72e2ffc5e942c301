"""Planted bug: the address leaves out the step, so all batches of a seed are equal."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SameBatches(MQAR):
    name: ClassVar[str] = "planted_same_batches"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(random.address.rpartition("/")[0], random.device))
