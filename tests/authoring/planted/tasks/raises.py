"""Planted bug: `draw` has no test split."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class Raises(MQAR):
    name: ClassVar[str] = "planted_raises"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        if split == "test":
            raise NotImplementedError("no test split\nyet")
        return super().draw(split, size, random)
