"""The common part of tasks whose metric is the share of right tokens, on examples that are always new."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class TokenAccuracy(Task):
    """A task whose metric is accuracy, the share of right tokens among those that are scored.

    Attributes:
        train_examples: The number of examples that a seed trains on; None for new examples in every batch.

    Raises:
        InputError: `train_examples` is below 1.
    """

    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    train_examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.train_examples is None or self.train_examples >= 1, "train_examples", "must be at least 1")

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = logits.argmax(-1) == batch.labels
        nats = surprisal(batch, logits).double()
        count = nats.new_tensor(len(nats))
        return {"accuracy": (right.sum().double(), count), "loss": (nats.sum(), count)}


def early_slots(random: Random, slots: int, power: float, size: int, count: int) -> Tensor:
    """Draws `count` different slots of `slots` for each row, [size, count].

    Slot i, counted from 1, has the weight i^(power - 1), and slots are drawn one by one without replacement: the first
    of independent exponential clocks to ring, as in the task `mqar`.
    """
    arrival = random.exponential("slots", size, slots) * _patience(slots, power, random.device)
    return arrival.sort(dim=1, stable=True).indices[:, :count]


@cache
def _patience(slots: int, power: float, device: torch.device) -> Tensor:
    # Use Python's pow: torch's differs between devices in the last bit.
    return torch.tensor([(i + 1) ** (1 - power) for i in range(slots)], dtype=torch.float64, device=device)


def shuffled(random: Random, stream: str, x: Tensor) -> Tensor:
    """Returns x [B, n, ...] with the n entries of each row in a new order, all orders equally likely."""
    order = random.distinct(stream, x.shape[1], x.shape[0], x.shape[1])
    return x.gather(1, order.view(*order.shape, *[1] * (x.dim() - 2)).expand_as(x))
