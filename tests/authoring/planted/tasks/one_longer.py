"""Planted bug: the sequences are one token longer than `length`."""

from typing import ClassVar

from torch.nn import functional

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class OneLonger(MQAR):
    name: ClassVar[str] = "planted_one_longer"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        return Batch(functional.pad(batch.inputs, (0, 1)), functional.pad(batch.targets, (0, 1), value=IGNORE))
