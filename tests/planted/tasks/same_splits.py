"""Planted bug: the split is left out of the address, so that the model is tested on what it was trained on."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SameSplits(MQAR):
    name: ClassVar[str] = "planted_same_splits"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(random.address.replace(split, "any"), random.device))
