"""Planted bug: each split has facts of its own, so that training does not teach what the test asks for."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class FactsOfASplit(MQAR):
    name: ClassVar[str] = "planted_facts_of_a_split"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        half = self.vocab_size // 2
        facts = half + Random(f"{self.name}/{split}", random.device).distinct("facts", half, 1, half)[0]
        asked = batch.targets != IGNORE
        inputs = torch.where(torch.arange(self.length, device=random.device) < 2 * self.pairs, 0, batch.inputs)
        return Batch(inputs, torch.where(asked, facts[inputs.clamp(max=half - 1)], IGNORE))
