"""Planted bug: a token is not below `vocab_size`, which crashes a GPU."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class BeyondVocabulary(MQAR):
    name: ClassVar[str] = "planted_beyond_vocabulary"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        batch.inputs[:, -1] = self.vocab_size
        return batch
