"""MQAR in which some keys get a second value: a state has to replace one value and to keep the others."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch
from deltalab.tasks.token_accuracy import TokenAccuracy, early_slots


@dataclass(frozen=True, kw_only=True)
class ForgettingMQAR(TokenAccuracy):
    """Multi-query associative recall of the last value of each key.

    With L = `length`, n = `pairs`, m = `updates` and V = `vocab_size`: n different keys from [1, V/2) with n different
    values from [V/2, V) open the sequence as k1 v1 ... kn vn. Then m of the keys, in any order, come again with another
    value each, uniform among the others. Then every key is asked once, in one of S = (L - 2n - 2m)/2 slots, where slot
    i has the weight i^(power - 1). The target is the last value of the key. Other positions hold 0.

    A decay alone makes all keys fade alike: it loses an old value only together with the values that are to stay. The
    delta rule takes off what the state holds at one key. So sums with a decay read a mixture of two values at a key
    that was written twice (Schlag et al. 2021, arXiv:2102.11174, Section 4.1).

    `chance` is the accuracy of naming any value, 2/V. Naming the first value of every key has the accuracy 1 - m/n.

    Attributes:
        length: L.
        pairs: n.
        updates: m.
        vocab_size: V.
        power: The exponent of the slots' weights.

    Raises:
        InputError: L is odd, below 4n + 2m, or n >= V/2; m is not in [1, n]; or `power` is not positive.

    Examples:
        >>> task = ForgettingMQAR(length=16, pairs=2, updates=1, vocab_size=16)
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 1,  9,  7, 11,  7, 10,  1,  0,  7,  0,  0,  0,  0,  0,  0,  0]])
        >>> batch.targets[0, 6:9]
        tensor([   9, -100,   10])

    References:
        HazyResearch/zoology, `forgetting_mqar`, whose distribution this is. Theirs may fill positions with random
        tokens.
    """

    name: ClassVar[str] = "forgetting_mqar"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "pairs": 4, "updates": 2, "vocab_size": 64}

    length: int
    pairs: int
    updates: int
    vocab_size: int = 8192
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.pairs >= 1, "pairs", "must be at least 1")
        self.require(1 <= self.updates <= self.pairs, "updates", f"must be from 1 to pairs = {self.pairs}")
        self.require(self.length % 2 == 0, "length", "must be even")
        least = 4 * self.pairs + 2 * self.updates
        self.require(self.length >= least, "length", f"must be at least 4 x pairs + 2 x updates = {least}")
        least = 2 * (self.pairs + 1)
        self.require(self.vocab_size // 2 > self.pairs, "vocab_size", f"must be at least 2 x (pairs + 1) = {least}")
        self.require(self.power > 0, "power", "must be above 0")

    @property
    def most_scored(self) -> int:
        return self.pairs

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        half, many = self.vocab_size // 2, self.vocab_size - self.vocab_size // 2
        keys = 1 + random.distinct("keys", half - 1, size, self.pairs)
        values = random.distinct("values", many, size, self.pairs)
        which = random.distinct("which", self.pairs, size, self.updates)
        old = values.gather(1, which)
        new = (old + 1 + random.integers("new", many - 1, size, self.updates)) % many
        context = torch.cat(
            [
                torch.stack([keys, half + values], dim=2).flatten(1),
                torch.stack([keys.gather(1, which), half + new], dim=2).flatten(1),
            ],
            dim=1,
        )
        last = half + values.scatter(1, which, new)
        begin = context.shape[1]
        at = begin + 2 * early_slots(random, (self.length - begin) // 2, self.power, size, self.pairs)
        inputs = torch.zeros(size, self.length, dtype=torch.int64, device=random.device)
        inputs[:, :begin] = context
        inputs.scatter_(1, at, keys)
        return Batch(inputs, torch.full_like(inputs, IGNORE).scatter_(1, at, last))

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = (logits.argmax(-1) == batch.labels).double().view(-1, self.pairs)
        begin = 2 * self.pairs + 2 * self.updates
        updated = batch.inputs[:, 2 * self.pairs : begin : 2]
        asked = batch.inputs[batch.targets != IGNORE].view(-1, self.pairs)
        twice = (asked[:, :, None] == updated[:, None]).any(2).double()
        return {
            **super().measure(batch, logits),
            "updated": ((right * twice).sum(), twice.sum()),
            "kept": ((right * (1 - twice)).sum(), (1 - twice).sum()),
        }
