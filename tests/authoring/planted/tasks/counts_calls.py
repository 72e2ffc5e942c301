"""Planted bug: a batch depends on the number of batches drawn before it."""

from itertools import count
from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random

CALLS = count()


class CountsCalls(MQAR):
    name: ClassVar[str] = "planted_counts_calls"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(f"{random.address}/{next(CALLS)}", random.device))
