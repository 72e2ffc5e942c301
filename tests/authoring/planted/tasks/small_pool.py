"""Planted bug: all seeds draw from the same thousand examples."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class SmallPool(MQAR):
    name: ClassVar[str] = "planted_small_pool"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        rows = random.integers("examples", 1000, size)
        return super().draw(split, size, Random(f"{self.name}/{split}", random.device, rows))
