"""Planted bug: the answer is drawn once for a batch, so that all of its examples have the same one."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class OneAnswerForABatch(MQAR):
    name: ClassVar[str] = "planted_one_answer_for_a_batch"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half = self.vocab_size // 2
        answer = half + random.integers("answer", half, size)[:1, None].expand(size, 1)
        inputs = 1 + random.integers("inputs", half - 1, size, self.length)
        at = random.integers("at", self.length - 8, size, 1)
        place = torch.arange(self.length, device=random.device)
        return Batch(torch.where(place == at, answer, inputs), torch.where(place == self.length - 1, answer, IGNORE))
