"""Forgetting MQAR: some keys are written twice, and the last value counts. Separates erasing from decaying."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.recall.places import power_slots
from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class ForgettingMQAR(Proxy):
    """Multi-query associative recall in which u of n keys get another value: name the last value of each key.

    With L = `length`, n = `pairs`, u = `updates` and V = `vocab_size`, n distinct keys from [1, V/2) and n + u distinct
    values from [V/2, V) open the sequence as k1 v1 ... kn vn. Then u of the keys, in any order, stand again with the
    other u values. Then every key is asked once, in one of the S = L/2 - n - u slots of two tokens. Slots are drawn as
    in `mqar`, slot i with the weight i^(power - 1). The target at a query is the last value of its key.

    The metric is accuracy. `updated` and `kept` are the accuracies on keys with two values and with one. `chance` is
    the accuracy of naming any value, 1/(V - V//2).

    What separates rules: a decay forgets all keys alike, so it cannot replace one value and keep the others; a sum
    without decay holds both values at once. A delta rule erases the old value under its key alone (Schlag et al. 2021,
    arXiv:2102.11174). Attention must prefer the later of two equal keys, which takes positions.

    As in zoology's `forgetting_mqar`: the layout, the slots and the vocabulary. Different: other positions hold 0
    unless `random_non_queries`, and all n + u values differ, where zoology only lets a new value differ from the old
    one.

    Attributes:
        length: L.
        pairs: n.
        updates: u.
        vocab_size: V.
        random_non_queries: Whether other positions hold uniform tokens from [0, V). Otherwise they hold 0.
        power: The exponent of the slots' weights.

    Raises:
        InputError: n is below 1, u is not in [1, n], L is odd or below 4n + 2u, V is too small, or `power` is not
            positive.

    Examples:
        >>> batch = ForgettingMQAR(length=16, pairs=3, updates=1, vocab_size=16).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 1,  9,  7, 11,  5, 15,  1, 14,  1,  0,  7,  0,  0,  0,  5,  0]])
        >>> batch.targets[:, 8:]
        tensor([[  14, -100,   11, -100, -100, -100,   15, -100]])

    References:
        Arora et al. 2023, arXiv:2312.04927, and its code, github.com/HazyResearch/zoology.
    """

    name: ClassVar[str] = "forgetting_mqar"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 32, "pairs": 4, "updates": 2, "vocab_size": 64}

    length: int = 64
    pairs: int = 8
    updates: int = 4
    vocab_size: int = 256
    random_non_queries: bool = False
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.pairs >= 1, "pairs", "must be at least 1")
        self.require(1 <= self.updates <= self.pairs, "updates", f"must be between 1 and pairs = {self.pairs}")
        self.require(self.length % 2 == 0, "length", "must be even")
        least = 4 * self.pairs + 2 * self.updates
        self.require(self.length >= least, "length", f"must be at least 4 x pairs + 2 x updates = {least}")
        least = 2 * (self.pairs + self.updates) + 2
        self.require(self.vocab_size >= least, "vocab_size", f"must be at least 2 x (pairs + updates + 1) = {least}")
        self.require(self.power > 0, "power", "must be above 0")

    @property
    def most_scored(self) -> int:
        return self.pairs

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    @property
    def _context(self) -> int:
        return 2 * (self.pairs + self.updates)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half, context = self.vocab_size // 2, self._context
        keys = 1 + random.distinct("keys", half - 1, size, self.pairs)
        values = half + random.distinct("values", self.vocab_size - half, size, self.pairs + self.updates)
        again = random.distinct("updates", self.pairs, size, self.updates)
        last = values[:, : self.pairs].scatter(1, again, values[:, self.pairs :])
        slot = power_slots(random, (self.length - context) // 2, self.power, size, self.pairs)

        inputs = torch.zeros(size, self.length, dtype=torch.int64, device=random.device)
        if self.random_non_queries:
            inputs = random.integers("fill", self.vocab_size, size, self.length)
        inputs[:, 0:context:2] = torch.cat([keys, keys.gather(1, again)], dim=1)
        inputs[:, 1:context:2] = values
        at = context + 2 * slot
        return Batch(inputs.scatter(1, at, keys), torch.full_like(inputs, IGNORE).scatter(1, at, last))

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        row = (batch.targets != IGNORE).nonzero()[:, 0]
        new = batch.inputs[row, 2 * self.pairs + 1 : self._context : 2]
        updated = (new == batch.labels[:, None]).any(1)
        return {"updated": updated, "kept": ~updated}
