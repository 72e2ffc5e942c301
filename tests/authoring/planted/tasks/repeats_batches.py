"""Planted bug: training repeats its batches after 100 steps."""

from typing import ClassVar

from deltalab.tasks import MQAR


class RepeatsBatches(MQAR):
    name: ClassVar[str] = "planted_repeats_batches"

    def address(self, split: str, seed: int, step: int | str) -> str:
        return super().address(split, seed, step if isinstance(step, str) else step % 100)
