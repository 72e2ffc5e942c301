"""Planted bug: positions behind the context that ask for nothing are scored, with 0 as the answer."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class ScoresPadding(MQAR):
    name: ClassVar[str] = "planted_scores_padding"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        place = torch.arange(self.length, device=random.device)
        empty = (place >= 2 * self.pairs) & (batch.targets == IGNORE)
        batch.targets.masked_fill_(empty, 0)
        return batch
