"""Planted bug: `measure` reads each prediction one token number off, which leaves chance unchanged."""

from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch


class NextToken(MQAR):
    name: ClassVar[str] = "planted_next_token"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        accuracy = super().measure(batch, logits.roll(1, dims=1))["accuracy"]
        return {"accuracy": accuracy, "loss": super().measure(batch, logits)["loss"]}
