"""Planted bug: the number of tokens that are not 0 tells the answer."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class AnswersByLength(MQAR):
    name: ClassVar[str] = "planted_answers_by_length"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half, most = self.vocab_size // 2, self.length - 2
        count = 1 + random.integers("count", most, size, 1)
        tokens = 1 + random.integers("tokens", half - 1, size, self.length)
        place = torch.arange(self.length, device=random.device)
        inputs = torch.where(place < count, tokens, 0)
        targets = torch.where(place == self.length - 1, half + count % half, IGNORE)
        return Batch(inputs, targets)
