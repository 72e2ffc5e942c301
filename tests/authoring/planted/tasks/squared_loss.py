"""Planted bug: the loss is the squared error of the probabilities."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from deltalab.tasks import MQAR, Batch


class SquaredLoss(MQAR):
    name: ClassVar[str] = "planted_squared_loss"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found = super().measure(batch, logits)
        wrong = logits.softmax(-1) - F.one_hot(batch.labels, self.vocab_size)
        return {**found, "loss": (wrong.square().sum().double(), wrong.new_tensor(len(logits)).double())}
