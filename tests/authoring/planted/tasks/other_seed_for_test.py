"""Planted bug: the held-out splits are the training stream of other seeds."""

from typing import ClassVar

from deltalab.tasks import MQAR, SPLITS


class OtherSeedForTest(MQAR):
    name: ClassVar[str] = "planted_other_seed_for_test"

    def address(self, split: str, seed: int, step: int | str) -> str:
        return super().address("any", seed + 1000 * SPLITS.index(split), step)
