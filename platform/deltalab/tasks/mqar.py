"""Multi-query associative recall, the task that separates update rules by how much their state can hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.errors import InputError
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

    `mixture`: parts [length, pairs, weight]. A training example is of one of them, with a probability proportional
    to its weight, and filled up with zeros to L; [L, n] is among them, and no part is longer.
    `tests`: the [length, pairs] that are evaluated, each under the label LENGTHxPAIRS; without them it is what is
    trained on.
    `train_examples`: how many examples a seed trains on; None for new ones in every batch.

    The paper's grid is (L, n) = (64, 4), (128, 8), (256, 16) and (512, 64), with 100,000 examples each. Later papers
    train on the mixture [64, 4, 100000] and 20,000 each of [128, 8], [256, 16], [256, 32] and [256, 64], and test
    at (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128) and (1024, 256).

    Metric: accuracy, the mean over examples of the share of right answers. `chance` is that of naming any
    value, 2/V. Naming any value *of the context*, without knowing which belongs to the key, already gives
    1/n: the plateau that models learn first.

    L = `length` is even, 4n <= L, n < V/2, of every part and test too, and `power` > 0 (`InputError` otherwise).

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
    mixture: tuple[tuple[int, int, int], ...] = ()
    tests: tuple[tuple[int, int], ...] = ()
    train_examples: int | None = None

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
        self.require(self.train_examples is None or self.train_examples >= 1, "train_examples", "must be at least 1")
        for name, parts in (("mixture", [part[:2] for part in self.mixture]), ("tests", [*self.tests])):
            self.require(len(set(parts)) == len(parts), name, "must have each [length, pairs] once")
            for length, pairs in parts:
                try:
                    self._alone(length, pairs)
                except InputError as error:
                    raise InputError(f"{error}, in '{name}'") from None
        if self.mixture:
            self.require(all(weight >= 1 for *_, weight in self.mixture), "mixture", "must have weights of at least 1")
            here, lengths = (self.length, self.pairs), [length for length, *_ in self.mixture]
            fits = max(lengths) == self.length and here in [part[:2] for part in self.mixture]
            self.require(fits, "mixture", f"must have [length, pairs] = {[*here]} in it, and nothing longer")

    def _alone(self, length: int, pairs: int) -> "MQAR":
        return replace(self, length=length, pairs=pairs, mixture=(), tests=())

    @property
    def most_scored(self) -> int:
        return max(pairs for _, pairs, *_ in self.mixture or ((self.length, self.pairs),))

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def evaluations(self) -> Mapping[str, Task]:
        return {f"{length}x{pairs}": self._alone(length, pairs) for length, pairs in self.tests} or {"": self}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        device, half = random.device, self.vocab_size // 2
        parts = self.mixture or ((self.length, self.pairs, 1),)
        length, n = _drawn(parts, size, random)
        most, slots = max(pairs for _, pairs, _ in parts), max(length // 2 - pairs for length, pairs, _ in parts)
        keys = 1 + random.distinct("keys", half - 1, size, most)
        values = half + random.distinct("values", self.vocab_size - half, size, most)

        # The first n to arrive of S independent exponential clocks: the same law as drawing slots one by one
        # (and as Gumbel top-n). The sort is stable because topk breaks ties differently on each device.
        arrival = random.exponential("slots", size, slots) * _patience(slots, self.power, device)
        arrival = torch.where(torch.arange(slots, device=device) < length // 2 - n, arrival, torch.inf)
        slot = arrival.sort(dim=1, stable=True).indices[:, :most]

        # What an example has no pair for is written behind its end, and cut off.
        pair = torch.arange(most, device=device)
        key_at, value_at, query_at = (
            torch.where(pair < n, position, self.length) for position in (2 * pair, 2 * pair + 1, 2 * (n + slot))
        )
        inputs = torch.zeros(size, self.length + 1, dtype=torch.int64, device=device)
        if self.random_non_queries:
            fill = random.integers("fill", self.vocab_size, size, self.length)
            inputs[:, :-1] = torch.where(torch.arange(self.length, device=device) < length, fill, 0)
        inputs.scatter_(1, key_at, keys).scatter_(1, value_at, values).scatter_(1, query_at, keys)
        targets = torch.full_like(inputs, IGNORE).scatter_(1, query_at, values)
        return Batch(inputs[:, :-1].contiguous(), targets[:, :-1].contiguous())

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        scored = batch.targets != IGNORE
        right = (logits.argmax(-1) == batch.targets[scored]).double()
        asked = scored.sum(1)
        shares = right / asked.repeat_interleave(asked)
        nats = surprisal(batch, logits).double()
        return {
            "accuracy": (shares.sum(), shares.new_tensor(len(asked))),
            "loss": (nats.sum(), nats.new_tensor(len(nats))),
        }


@cache
def _table(parts: tuple[tuple[int, int, int], ...], device: torch.device) -> Tensor:
    lengths, pairs, weights = zip(*parts, strict=True)
    return torch.tensor([lengths, pairs, [*accumulate(weights)]], device=device)


def _drawn(parts: tuple[tuple[int, int, int], ...], size: int, random: Random) -> tuple[Tensor, Tensor]:
    """Length and pairs of each example, [B, 1]."""
    lengths, pairs, until = _table(parts, random.device)
    part = torch.searchsorted(until, random.integers("parts", sum(weight for *_, weight in parts), size, 1), right=True)
    return lengths[part], pairs[part]


@cache
def _patience(slots: int, power: float, device: torch.device) -> Tensor:
    # Mean waiting times, 1 / weight, from Python's pow: torch's differs between devices in the last bit.
    return torch.tensor([i ** (1 - power) for i in range(1, slots + 1)], dtype=torch.float64, device=device)
