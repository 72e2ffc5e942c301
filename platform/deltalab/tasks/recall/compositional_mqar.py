"""MQAR with keys of two tokens, neither of which tells the value alone: a state has to bind two tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch
from deltalab.tasks.token_accuracy import TokenAccuracy, early_slots, shuffled


@dataclass(frozen=True, kw_only=True)
class CompositionalMQAR(TokenAccuracy):
    """Multi-query associative recall with keys (a, b) from a grid.

    With L = `length`, g = `grid` and V = `vocab_size`: g different tokens a from [1, V/3) and g different tokens b from
    [V/3, 2V/3) make g^2 keys, which get different values from [2V/3, V). The g^2 triples a b v open the sequence in any
    order. Then every key is asked once as a b, in one of S = (L - 3g^2)/3 slots, where slot i has the weight
    i^(power - 1). The target at b is v. Other positions hold 0.

    A state that stores values under single tokens cannot answer: a and b each have g values. A layer has to make a key
    of two neighbouring tokens first, by a short convolution or by an earlier layer, so that rules without a
    convolution need a layer more than on `mqar`.

    `chance` is the accuracy of naming any value, 3/V. Naming any value that a had has the accuracy 1/g.

    Attributes:
        length: L.
        grid: g.
        vocab_size: V.
        power: The exponent of the slots' weights.

    Raises:
        InputError: g is below 2, L is below 6 g^2, V/3 is not above g^2, or `power` is not positive.

    Examples:
        >>> task = CompositionalMQAR(length=24, grid=2, vocab_size=24)
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> batch.inputs[0, :12].view(4, 3)
        tensor([[ 2, 15, 22],
                [ 5, 14, 21],
                [ 2, 14, 16],
                [ 5, 15, 20]])

    References:
        HazyResearch/zoology, `compositional_mqar`, whose distribution this is. Theirs may fill positions with random
        tokens.
    """

    name: ClassVar[str] = "compositional_mqar"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "grid": 2, "vocab_size": 96}

    length: int
    grid: int
    vocab_size: int = 8192
    power: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.grid >= 2, "grid", "must be at least 2")
        least = 6 * self.grid**2
        self.require(self.length >= least, "length", f"must be at least 6 x grid^2 = {least}")
        least = 3 * (self.grid**2 + 1)
        self.require(self.vocab_size >= least, "vocab_size", f"must be at least 3 x (grid^2 + 1) = {least}")
        self.require(self.power > 0, "power", "must be above 0")

    @property
    def most_scored(self) -> int:
        return self.grid**2

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2 * (self.vocab_size // 3))

    def draw(self, split: str, size: int, random: Random) -> Batch:
        third, grid, count = self.vocab_size // 3, self.grid, self.grid**2
        first = 1 + random.distinct("first", third - 1, size, grid)
        second = third + random.distinct("second", third, size, grid)
        values = 2 * third + random.distinct("values", self.vocab_size - 2 * third, size, count)
        pairs = [first.repeat_interleave(grid, 1), second.repeat(1, grid), values]
        triples = shuffled(random, "order", torch.stack(pairs, dim=2))
        begin = 3 * count
        at = begin + 3 * early_slots(random, (self.length - begin) // 3, self.power, size, count)
        inputs = torch.zeros(size, self.length, dtype=torch.int64, device=random.device)
        inputs[:, :begin] = triples.flatten(1)
        inputs.scatter_(1, at, triples[:, :, 0]).scatter_(1, at + 1, triples[:, :, 1])
        return Batch(inputs, torch.full_like(inputs, IGNORE).scatter_(1, at + 1, triples[:, :, 2]))
