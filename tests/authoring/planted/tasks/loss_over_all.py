"""Planted bug: the loss is divided by the number of all positions, scored or not."""

from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch


class LossOverAll(MQAR):
    name: ClassVar[str] = "planted_loss_over_all"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found = super().measure(batch, logits)
        total, _ = found["loss"]
        return {**found, "loss": (total, total.new_tensor(batch.targets.numel()))}
