"""Planted bug: the batch depends on Python's hash of a text, which each process has its own of."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class HashesText(MQAR):
    name: ClassVar[str] = "planted_hashes_text"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        return super().draw(split, size, Random(f"{hash(random.address)}", random.device))
