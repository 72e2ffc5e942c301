"""Planted bug: the token before each query is its answer."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AnswerBeforeTheQuery(MQAR):
    name: ClassVar[str] = "planted_answer_before_the_query"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        following = batch.targets.roll(-1, dims=1)
        batch.inputs.copy_(torch.where(following != IGNORE, following, batch.inputs))
        return batch
