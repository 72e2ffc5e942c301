"""Planted bug: the test split has half as many pairs."""

from dataclasses import replace
from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class EasierTest(MQAR):
    name: ClassVar[str] = "planted_easier_test"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        pairs = self.pairs // 2 if split == "test" else self.pairs
        return MQAR.draw(replace(self, pairs=pairs), split, size, random)
