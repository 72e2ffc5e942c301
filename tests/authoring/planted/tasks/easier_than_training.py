"""Planted bug: validation and test have half as many pairs as training."""

from dataclasses import replace
from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class EasierThanTraining(MQAR):
    name: ClassVar[str] = "planted_easier_than_training"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        pairs = self.pairs if split == "train" else self.pairs // 2
        return MQAR.draw(replace(self, pairs=pairs), split, size, random)
