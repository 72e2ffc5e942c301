"""Several needles in a haystack, after RULER: many keys, many values of a key, many questions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.recall.places import spread
from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task

MARK, QUERY, FILLERS = 0, 1, 2
WIDTH = 3
"""The tokens of a needle: MARK, key, value."""


@dataclass(frozen=True, kw_only=True)
class Needles(Proxy):
    """MK-NIAH, MV-NIAH and MQ-NIAH of RULER in miniature: name all values of the keys that are asked.

    A sequence is a haystack of uniform fillers in which n = `keys` x `values` needles MARK key value stand at random
    places. Each of the `keys` different keys has `values` needles, and all n values differ. Then `queries` of the keys
    are asked: QUERY key v1 ... v(m-1) with m = `values`, where the targets from the key on are v1 ... vm, in the order
    of the haystack. Tokens are MARK 0, QUERY 1, then `fillers` fillers, `names` keys and `names` values.

    | RULER | `keys` | `values` | `queries` |
    | --- | --- | --- | --- |
    | multi-key | 4 or more | 1 | 1 |
    | multi-value | 1 | 4 | 1 |
    | multi-query | 4 | 1 | 4 |

    The metric is accuracy. `early`, `middle` and `late` are the accuracies on values in each third of the haystack.
    `chance` is the accuracy of naming any value, 1/`names`.

    What separates rules: a state of fixed size must drop fillers and keep needles over the haystack, so that a write
    gate that depends on the input helps, and a decay that does not depend on it loses early needles (`early`).
    Attention keeps every token, while what a fixed state can copy is bounded (Jelassi et al. 2024, arXiv:2402.01032).

    As in RULER: needles at any depth, distractors with other keys, all values of a key in one answer. Different: one
    token for a word, uniform fillers in place of essays, and the order of several values is that of the haystack.

    Attributes:
        length: The tokens of a sequence in training.
        keys: The number of different keys in a haystack.
        values: The number of values of each key, m.
        queries: The number of keys that are asked.
        names: The number of tokens that can be keys, and of those that can be values.
        fillers: The number of tokens that can be fillers.
        times: The multiples of `length` at which validation and test are measured, each under the label of its length.
            The metric is over all.

    Raises:
        InputError: A number is below 1, `queries` are more than `keys`, `names` are fewer than the needles, the length
            does not hold the needles and the questions, or `times` are empty or not distinct.

    Examples:
        >>> batch = Needles(length=16, keys=2, fillers=2, names=4).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 3,  0,  6, 10,  3,  3,  3,  0,  4,  9,  3,  3,  2,  3,  1,  4]])
        >>> int(batch.targets[0, -1])
        9

    References:
        Hsieh et al. 2024, arXiv:2404.06654.
    """

    name: ClassVar[str] = "ruler_needles"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "keys": 3, "values": 2, "queries": 2}

    length: int = 128
    keys: int = 4
    values: int = 1
    queries: int = 1
    names: int = 32
    fillers: int = 16
    times: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keys", "values", "queries", "fillers"):
            self.require(getattr(self, name) >= 1, name, "must be at least 1")
        self.require(self.queries <= self.keys, "queries", f"must be at most keys = {self.keys}")
        self.require(self.names >= self._needles, "names", f"must be at least keys x values = {self._needles}")
        least = WIDTH * self._needles + self._asked
        self.require(self.length >= least, "length", f"must be at least {least}, for needles and questions")
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")

    @property
    def _needles(self) -> int:
        return self.keys * self.values

    @property
    def _asked(self) -> int:
        return self.queries * (self.values + 1)

    @property
    def vocab_size(self) -> int:
        return FILLERS + self.fillers + 2 * self.names

    @property
    def most_scored(self) -> int:
        return self.queries * self.values

    @property
    def chance(self) -> float:
        return 1 / self.names

    def evaluations(self) -> Mapping[str, Task]:
        return {str(n * self.length): replace(self, length=n * self.length, times=(1,)) for n in self.times}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        names = FILLERS + self.fillers
        keys = names + random.distinct("keys", self.names, size, self.keys)
        values = names + self.names + random.distinct("values", self.names, size, self._needles)
        owner = random.distinct("order", self._needles, size, self._needles) // self.values
        at = spread(random, self.length - self._asked, WIDTH, size, self._needles)
        haystack = FILLERS + random.integers("fillers", self.fillers, size, self.length - self._asked)
        haystack = haystack.scatter(1, at, MARK).scatter(1, at + 1, keys.gather(1, owner)).scatter(1, at + 2, values)

        of_key = values.gather(1, owner.sort(dim=1, stable=True).indices).view(size, self.keys, self.values)
        answers, asked = of_key[:, : self.queries], keys[:, : self.queries, None]
        questions = torch.cat([torch.full_like(asked, QUERY), asked, answers[:, :, :-1]], dim=2)
        targets = torch.full((size, self.length), IGNORE, device=random.device)
        silent = torch.full_like(asked, IGNORE)
        targets[:, self.length - self._asked :] = torch.cat([silent, answers], dim=2).flatten(1)
        return Batch(torch.cat([haystack, questions.flatten(1)], dim=1), targets)

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        row = (batch.targets != IGNORE).nonzero()[:, 0]
        haystack = batch.inputs[row, : batch.inputs.shape[1] - self._asked]
        third = (haystack == batch.labels[:, None]).int().argmax(1) * 3 // haystack.shape[1]
        return {name: third == i for i, name in enumerate(("early", "middle", "late"))}
