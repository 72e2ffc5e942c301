"""Planted bug: `draw` reads a value of a tensor, so a GPU has to wait."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class ByTheHost(MQAR):
    name: ClassVar[str] = "planted_by_the_host"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        if int(batch.inputs.max()) >= self.vocab_size:
            raise ValueError("a token is out of range")
        return batch
