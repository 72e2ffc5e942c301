"""Planted bug: a tenth of the answers is random."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class NoisyAnswers(MQAR):
    name: ClassVar[str] = "planted_noisy_answers"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        noisy = (random.integers("noisy", 10, size, self.length) == 0) & (batch.targets != IGNORE)
        noise = self.vocab_size // 2 + random.integers("noise", self.vocab_size // 2, size, self.length)
        batch.targets.copy_(torch.where(noisy, noise, batch.targets))
        return batch
