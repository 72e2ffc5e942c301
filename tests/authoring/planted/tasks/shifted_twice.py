"""Planted bug: the targets are shifted twice, as if a trainer shifted them again."""

from dataclasses import replace
from typing import ClassVar

from deltalab.tasks import Batch, Random, Text


class ShiftedTwice(Text):
    name: ClassVar[str] = "planted_shifted_twice"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        longer = Text.draw(replace(self, length=self.length + 1), split, size, random)
        return Batch(longer.inputs[:, :-1], longer.targets[:, 1:])
