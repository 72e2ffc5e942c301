"""Planted bug: the loss is in bits."""

import math
from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch


class LossInBits(MQAR):
    name: ClassVar[str] = "planted_loss_in_bits"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found = super().measure(batch, logits)
        total, count = found["loss"]
        return {**found, "loss": (total / math.log(2), count)}
