"""Planted bug: half of the test's values never occur in training."""

from typing import ClassVar

from deltalab.tasks import MQAR, Batch, Random


class NewTokensInTest(MQAR):
    name: ClassVar[str] = "planted_new_tokens_in_test"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        if split == "train":
            for tokens in (batch.inputs, batch.targets):
                tokens.sub_(16 * (tokens >= 48).long())
        return batch
