"""Multi-query associative recall: separates update rules by how much their state can hold."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class MQAR(Task):
    """Multi-query associative recall: name the value of each key that is asked.

    With L = `length`, n = `pairs` and V = `vocab_size`, n distinct keys from [1, V/2) and n distinct values from
    [V/2, V) open the sequence as k1 v1 k2 v2 ... kn vn. Then every key is asked once. There are S = (L - 2n)/2 slots
    after the context. Slot i, counted from 1, has the weight i^(power - 1). Key j draws a slot i_j without replacement
    and stands at position 2n + 2 (i_j - 1), where the target is v_j.

    The metric is accuracy, the mean over examples of the share of right answers. `chance` is the accuracy of naming any
    value, 2/V. A model that names any value *of the context*, without knowing which value belongs to the key, already
    has the accuracy 1/n: the plateau that models learn first.

    The paper's grid is (L, n) = (64, 4), (128, 8), (256, 16) and (512, 64), with 100,000 examples each. Later papers
    train on the mixture [64, 4, 100000] and 20,000 each of [128, 8], [256, 16], [256, 32] and [256, 64], and test
    at (64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128) and (1024, 256).

    Attributes:
        length: L.
        pairs: n.
        vocab_size: V.
        random_non_queries: Whether other positions hold uniform tokens from [0, V). Otherwise they hold 0.
        power: The exponent of the slots' weights.
        mixture: Parts [length, pairs, weight]. Each training example is drawn from a part that is chosen with a
            probability proportional to its weight, and is filled up with zeros to L. [L, n] must be a part, and no part
            may be longer.
        tests: The [length, pairs] that are evaluated, each under the label LENGTHxPAIRS. If empty, evaluation is on the
            distribution of training.
        train_examples: The number of examples that a seed trains on; None for new examples in every batch.

    Raises:
        InputError: L is odd, 4n > L, or n >= V/2, also for a part or a test; or `power` is not positive.

    Examples:
        >>> task = MQAR(length=12, pairs=2, vocab_size=16)
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 7,  9,  2, 13,  0,  0,  7,  0,  2,  0,  0,  0]])
        >>> batch.targets
        tensor([[-100, -100, -100, -100, -100, -100,    9, -100,   13, -100, -100, -100]])

    References:
        Arora et al. 2023, arXiv:2312.04927.
    """

    name: ClassVar[str] = "mqar"
    version: ClassVar[int] = 1
    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
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
            own_part, lengths = (self.length, self.pairs), [length for length, *_ in self.mixture]
            fits = max(lengths) == self.length and own_part in [part[:2] for part in self.mixture]
            self.require(fits, "mixture", f"must have [length, pairs] = {[*own_part]} in it, and nothing longer")

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
        parts = self.mixture or ((self.length, self.pairs, 1),)
        tables = _tables(parts, self.power, random.device)
        half, most, slots = self.vocab_size // 2, tables.key_at.shape[1], tables.patience.shape[1]
        part: Tensor | slice = slice(None)  # the only row
        if len(parts) > 1:
            share = random.integers("parts", sum(weight for *_, weight in parts), size)
            part = torch.searchsorted(tables.until, share, right=True)
        keys = 1 + random.distinct("keys", half - 1, size, most)
        values = half + random.distinct("values", self.vocab_size - half, size, most)

        # Take the first n of S independent exponential clocks to ring. Their law is that of drawing slots one by one,
        # and of Gumbel top-n. Sort stably: topk breaks ties differently on each device.
        arrival = random.exponential("slots", size, slots) * tables.patience[part]
        slot = arrival.sort(dim=1, stable=True).indices[:, :most]

        # Write the pairs that an example lacks behind its end, where they are cut off.
        key_at, value_at = (at[part].expand(size, -1) for at in (tables.key_at, tables.value_at))
        query_at = tables.query_at[part].add(slot, alpha=2).clamp(max=self.length)
        inputs = torch.zeros(size, self.length + (len(parts) > 1), dtype=torch.int64, device=random.device)
        if self.random_non_queries:
            fill = random.integers("fill", self.vocab_size, size, self.length)
            inputs[:, : self.length] = torch.where(tables.there[part], fill, 0)
        inputs.scatter_(1, key_at, keys).scatter_(1, value_at, values).scatter_(1, query_at, keys)
        targets = torch.full_like(inputs, IGNORE).scatter_(1, query_at, values)
        return Batch(*(x[:, : self.length].contiguous() for x in (inputs, targets)))

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = (logits.argmax(-1) == batch.labels).double()
        asked = (batch.targets != IGNORE).sum(1)
        shares = right / asked.repeat_interleave(asked, output_size=len(right))
        nats = surprisal(batch, logits).double()
        return {
            "accuracy": (shares.sum(), shares.new_tensor(len(asked))),
            "loss": (nats.sum(), nats.new_tensor(len(nats))),
        }


class _Tables(NamedTuple):
    """Tables that all examples of a part share, for P parts.

    Attributes:
        until: The cumulated weights, [P].
        patience: The mean waiting times of the slots, 1 / weight, [P, S]; inf for a slot that a part lacks.
        key_at: The positions of keys, [P, n]; L for a pair that a part lacks.
        value_at: The positions of values, [P, n].
        query_at: The position of each query if it is in the first slot, [P, n].
        there: Whether a position lies within the part, [P, L].
    """

    until: Tensor
    patience: Tensor
    key_at: Tensor
    value_at: Tensor
    query_at: Tensor
    there: Tensor


@cache
def _tables(parts: tuple[tuple[int, int, int], ...], power: float, device: torch.device) -> _Tables:
    length, pairs, weight = torch.tensor(parts).T[..., None]
    slots = length // 2 - pairs
    slot, pair, position = (torch.arange(int(most.max())) for most in (slots, pairs, length))
    # Use Python's pow: torch's differs between devices in the last bit.
    patience = torch.tensor([(i + 1) ** (1 - power) for i in slot.tolist()], dtype=torch.float64)
    tables = _Tables(
        until=weight[:, 0].cumsum(0),
        patience=torch.where(slot < slots, patience, torch.inf),
        key_at=torch.where(pair < pairs, 2 * pair, len(position)),
        value_at=torch.where(pair < pairs, 2 * pair + 1, len(position)),
        query_at=torch.where(pair < pairs, 2 * pairs, len(position)),
        there=position < length,
    )
    return _Tables(*(table.to(device) for table in tables))
