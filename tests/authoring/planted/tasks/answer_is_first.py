"""Planted bug: every query asks for the first value, since the values are gathered at the wrong index."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AnswerIsFirst(MQAR):
    name: ClassVar[str] = "planted_answer_is_first"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        batch.targets.copy_(torch.where(batch.targets != IGNORE, batch.inputs[:, 1:2], IGNORE))
        return batch
