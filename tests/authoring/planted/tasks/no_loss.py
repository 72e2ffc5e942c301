"""Planted bug: `measure` returns no loss, which tuning and plots need."""

from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch


class NoLoss(MQAR):
    name: ClassVar[str] = "planted_no_loss"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {"accuracy": super().measure(batch, logits)["accuracy"]}
