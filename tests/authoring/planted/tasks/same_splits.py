"""Planted bug: the address leaves out the split, so the model is tested on its training data."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SameSplits(MQAR):
    name: ClassVar[str] = "planted_same_splits"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(random.address.replace(split, "any"), random.device))
