"""Planted bug: `measure` takes the answers of one position in all rows for those of one row."""

from typing import ClassVar

from torch import Tensor

from deltalab.tasks import MQAR, Batch


class MixedRows(MQAR):
    name: ClassVar[str] = "planted_mixed_rows"

    @property
    def chance(self) -> float:
        return (1 / (self.vocab_size - self.vocab_size // 2)) ** self.pairs

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = (logits.argmax(-1) == batch.labels).view(self.pairs, -1).all(0).double()
        return {"accuracy": (right.sum(), right.new_tensor(len(right))), "loss": super().measure(batch, logits)["loss"]}
