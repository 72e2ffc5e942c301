"""Planted bug: the batch of step 1 of seed 0 is that of step 0 of seed 1."""

from typing import ClassVar

from deltalab.tasks import MQAR


class SeedPlusStep(MQAR):
    name: ClassVar[str] = "planted_seed_plus_step"

    def address(self, split: str, seed: int, step: int | str) -> str:
        return super().address(split, 0, step if isinstance(step, str) else seed + step)
