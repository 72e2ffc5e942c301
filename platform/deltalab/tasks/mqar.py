"""Multi-query associative recall, the task that separates update rules by how much their state can hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Multi-query associative recall (Arora et al. 2023, arXiv:2312.04927).

    n = `pairs` distinct keys from [1, V/2) and n distinct values from [V/2, V) open the sequence as
    k1 v1 k2 v2 ... kn vn. Then every key is asked once. Of the S = (L - 2n)/2 slots after the context, slot i
    (from 1) with weight i^(power - 1), key j draws slot i_j without replacement and stands at position
    2n + 2 (i_j - 1); the target there is v_j. The other positions hold 0, or with `random_non_queries`
    uniform tokens from [0, V).

    Metric: accuracy, the mean over examples of the share of right answers. `chance` is that of naming any
    value, 2/V. Naming any value *of the context*, without knowing which belongs to the key, already gives
    1/n: the plateau that models learn first.

    L = `length` is even, 4n <= L, n < V/2, `power` > 0 (`InputError` otherwise).

    >>> task = MQAR(length=12, pairs=2, vocab_size=16)
    >>> batch = task.batch("train", 1, seed=0, step=0)
    >>> batch.inputs
    tensor([[ 7,  9,  2, 13,  0,  0,  7,  0,  2,  0,  0,  0]])
    >>> batch.targets
    tensor([[-100, -100, -100, -100, -100, -100,    9, -100,   13, -100, -100, -100]])
    """

    name: ClassVar[str] = "mqar"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    example: ClassVar[Mapping[str, object]] = {"length": 32, "pairs": 4, "vocab_size": 64}

    length: int
    pairs: int
    vocab_size: int = 8192
    random_non_queries: bool = False
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.pairs >= 1, "pairs", "must be at least 1")
        self.require(self.length % 2 == 0, "length", "must be even")
        self.require(4 * self.pairs <= self.length, "length", f"must be at least 4 x pairs = {4 * self.pairs}")
        self.require(
            self.vocab_size // 2 - 1 >= self.pairs,
            "vocab_size",
            f"must be at least 2 x (pairs + 1) = {2 * self.pairs + 2}",
        )
        self.require(self.power > 0, "power", "must be above 0")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        context, half = 2 * self.pairs, self.vocab_size // 2
        keys = 1 + random.distinct("keys", half - 1, size, self.pairs)
        values = half + random.distinct("values", self.vocab_size - half, size, self.pairs)

        # The first n to arrive of S independent exponential clocks: the same law as drawing slots one by one
        # (and as Gumbel top-n). The sort is stable because topk breaks ties differently on each device.
        slots = (self.length - context) // 2
        arrival = random.exponential("slots", size, slots) * _patience(slots, self.power, random.device)
        slot = arrival.sort(dim=1, stable=True).indices[:, : self.pairs]
        queries = context + 2 * slot

        shape = (size, self.length)
        if self.random_non_queries:
            inputs = random.integers("fill", self.vocab_size, *shape)
        else:
            inputs = torch.zeros(shape, dtype=torch.int64, device=random.device)
        inputs[:, 0:context:2] = keys
        inputs[:, 1:context:2] = values
        inputs.scatter_(1, queries, keys)
        return Batch(inputs, torch.full_like(inputs, IGNORE).scatter_(1, queries, values))

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = logits.argmax(-1) == batch.targets[batch.targets != IGNORE]
        shares = right.view(-1, self.pairs).double().mean(1)
        nats = surprisal(batch, logits).double()
        return {
            "accuracy": (shares.sum(), shares.new_tensor(len(shares))),
            "loss": (nats.sum(), nats.new_tensor(len(nats))),
        }


@cache
def _patience(slots: int, power: float, device: torch.device) -> Tensor:
    # Mean waiting times, 1 / weight, from Python's pow: torch's differs between devices in the last bit.
    return torch.tensor([i ** (1 - power) for i in range(1, slots + 1)], dtype=torch.float64, device=device)
