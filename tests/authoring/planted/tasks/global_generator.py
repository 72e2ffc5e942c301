"""Planted bug: `draw` fills gaps from the global generator, as zoology does, so two models see different data."""

from typing import ClassVar

import torch

from deltalab.tasks import MQAR, Batch, Random


class GlobalGenerator(MQAR):
    name: ClassVar[str] = "planted_global_generator"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        noise = torch.randint(self.vocab_size, batch.inputs.shape, device=random.device)
        batch.inputs[:, 2 * self.pairs :] += torch.where(batch.inputs == 0, noise, 0)[:, 2 * self.pairs :]
        return batch
