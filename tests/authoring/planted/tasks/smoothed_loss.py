"""Planted bug: the loss is smoothed over the labels."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from deltalab.tasks import MQAR, Batch


class SmoothedLoss(MQAR):
    name: ClassVar[str] = "planted_smoothed_loss"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found = super().measure(batch, logits)
        nats = F.cross_entropy(logits, batch.labels, label_smoothing=0.1, reduction="sum").double()
        return {**found, "loss": (nats, nats.new_tensor(len(logits)))}
