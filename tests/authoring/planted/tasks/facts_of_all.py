"""Planted bug: the values of keys are the same in all splits and examples."""

from typing import ClassVar

import torch

from deltalab.tasks import IGNORE, MQAR, Batch, Random


class FactsOfAll(MQAR):
    name: ClassVar[str] = "planted_facts_of_all"

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch, half = super().draw(split, size, random), self.vocab_size // 2
        facts = half + Random(self.name, random.device).distinct("facts", half, half, half)
        asked = batch.targets != IGNORE
        topic, key = batch.inputs[:, :1] % half, batch.inputs % half
        return Batch(batch.inputs, torch.where(asked, facts[topic, key], IGNORE))
