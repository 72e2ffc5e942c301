"""Compositional MQAR: a key has two parts, and neither tells the value alone. Separates states that bind two tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from deltalab.tasks.proxies.recall.places import power_slots
from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class CompositionalMQAR(Proxy):
    """Multi-query associative recall whose keys are the pairs (a, b) of a grid: name the value of each pair.

    With L = `length`, s = `side` and V = `vocab_size`, s distinct tokens a from [1, V/3), s distinct tokens b from
    [V/3, 2V/3) and n = s^2 distinct values from [2V/3, V) give the n triples a b v, one for each pair (a, b). They open
    the sequence in a random order. Then every pair is asked once, in one of the S = (L - 3n)/3 slots of three tokens
    (rounded down), which are drawn as in `mqar`. The target at b is the value of (a, b).

    The metric is accuracy. `chance` is the accuracy of naming any value, 1/(V - 2 (V//3)). A model that reads one part
    of the key names one of s values at best, 1/s.

    What separates rules: the key of a write must join two tokens. A single layer whose keys are functions of one token
    names one of s values, whatever its rule; a short convolution or an earlier layer brings a to b.

    As in zoology's `compositional_mqar`: the grid, the layout and the slots. Different: other positions hold 0 unless
    `random_non_queries`, and L may be odd.

    Attributes:
        length: L.
        side: s.
        vocab_size: V.
        random_non_queries: Whether other positions hold uniform tokens from [0, V). Otherwise they hold 0.
        power: The exponent of the slots' weights.

    Raises:
        InputError: s is below 2, L is below 6 s^2, V is too small, or `power` is not positive.

    Examples:
        >>> batch = CompositionalMQAR(length=24, side=2, vocab_size=15).batch("train", 1, seed=0, step=0)
        >>> batch.inputs[:, :12]
        tensor([[ 3,  7, 11,  4,  5, 12,  3,  5, 10,  4,  7, 14]])

    References:
        Arora et al. 2023, arXiv:2312.04927, and its code, github.com/HazyResearch/zoology.
    """

    name: ClassVar[str] = "compositional_mqar"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "side": 2, "vocab_size": 48}

    length: int = 96
    side: int = 3
    vocab_size: int = 192
    random_non_queries: bool = False
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.side >= 2, "side", "must be at least 2")
        pairs = self.side**2
        self.require(self.length >= 6 * pairs, "length", f"must be at least 6 x side^2 = {6 * pairs}")
        self.require(self.vocab_size >= 3 * pairs, "vocab_size", f"must be at least 3 x side^2 = {3 * pairs}")
        self.require(self.power > 0, "power", "must be above 0")

    @property
    def most_scored(self) -> int:
        return self.side**2

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2 * (self.vocab_size // 3))

    def draw(self, split: str, size: int, random: Random) -> Batch:
        third, pairs = self.vocab_size // 3, self.side**2
        pair = random.distinct("order", pairs, size, pairs)
        a = (1 + random.distinct("a", third - 1, size, self.side)).gather(1, pair // self.side)
        b = (third + random.distinct("b", third, size, self.side)).gather(1, pair % self.side)
        values = 2 * third + random.distinct("values", self.vocab_size - 2 * third, size, pairs)
        slot = power_slots(random, (self.length - 3 * pairs) // 3, self.power, size, pairs)

        inputs = torch.zeros(size, self.length, dtype=torch.int64, device=random.device)
        if self.random_non_queries:
            inputs = random.integers("fill", self.vocab_size, size, self.length)
        inputs[:, : 3 * pairs] = torch.stack([a, b, values], dim=2).flatten(1)
        at = 3 * pairs + 3 * slot
        inputs = inputs.scatter(1, at, a).scatter(1, at + 1, b)
        return Batch(inputs, torch.full_like(inputs, IGNORE).scatter(1, at + 1, values))
