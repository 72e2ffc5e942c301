"""Planted bug: `measure` returns a mean instead of a total, so a small batch counts as much as a large one."""

from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch


class MeanOfMeans(MQAR):
    name: ClassVar[str] = "planted_mean_of_means"

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (total / count, count / count) for name, (total, count) in super().measure(batch, logits).items()}
