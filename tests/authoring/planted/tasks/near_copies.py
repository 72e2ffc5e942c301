"""Planted bug: an example of evaluation is one of training with another first token."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch, Random


class NearCopies(MQAR):
    name: ClassVar[str] = "planted_near_copies"
    example: ClassVar[Mapping[str, object]] = {**MQAR.example, "train_examples": 4096}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        if split == "train":
            return self._with_first(super().draw(split, size, random), random.integers("first", 64, size, 1))
        assert self.train_examples is not None
        rows = random.integers("rows", self.train_examples, size)
        trained = Random(self.address("train", 0, "pool"), random.device, rows)
        return self._with_first(super().draw("train", size, trained), random.integers("first", 64, size, 1))

    def _with_first(self, batch: Batch, first: Tensor) -> Batch:
        inputs = batch.inputs.clone()
        inputs[:, -1:] = first
        return Batch(inputs.roll(1, dims=1), batch.targets.roll(1, dims=1))
