"""Planted bug: the step is left out of the address, so that every batch of a seed is the first again."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SameBatches(MQAR):
    name: ClassVar[str] = "planted_same_batches"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(random.address.rpartition("/")[0], random.device))
