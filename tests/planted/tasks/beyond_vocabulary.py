"""Planted bug: a token that `vocab_size` does not count, which a GPU answers with a crash of its own."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class BeyondVocabulary(MQAR):
    name: ClassVar[str] = "planted_beyond_vocabulary"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        batch.inputs[:, -1] = self.vocab_size
        return batch
