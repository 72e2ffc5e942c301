"""Planted bug: the query is not the key but the number of its value."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AnswerInCode(MQAR):
    name: ClassVar[str] = "planted_answer_in_code"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        asked = batch.targets != IGNORE
        batch.inputs.copy_(torch.where(asked, batch.targets - self.vocab_size // 2, batch.inputs))
        return batch
