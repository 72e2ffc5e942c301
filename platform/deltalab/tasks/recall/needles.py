"""RULER's needles of several keys, values and queries, as tokens in random filler."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task
from deltalab.tasks.token_accuracy import TokenAccuracy


@dataclass(frozen=True, kw_only=True)
class Needles(TokenAccuracy):
    """Needles in a haystack: multi-key, multi-value and multi-query, by their numbers.

    A haystack is S = (L - q m)/2 places of two tokens. There are n = `needles` different keys with m = `of_each` values
    each: n m places, all choices equally likely, hold a key and a value, and the other places hold words, uniform and
    with replacement. All values are different. Then q = `queries` of the keys are asked, as key v1 ... v(m-1), where
    v1 ... vm are the values of the key in their order in the haystack. The targets at these m tokens are v1 ... vm.

    RULER's MK-NIAH has many needles and asks one; MV-NIAH has several values of each; MQ-NIAH asks several. Words,
    keys and values are tokens of their own: [0, `words`), then `keys` keys, then `values` values.

    A state of K x V numbers for each head holds about K pairs apart, so that the number of needles, and not the
    distance, is what a delta rule runs out of; a decay runs out of distance, since it cannot know which words matter
    unless its gate tells words from keys.

    `chance` is the accuracy of naming any value, 1 / `values`.

    Attributes:
        length: L in training.
        needles: n.
        of_each: m.
        queries: q.
        words: The number of words of the filler.
        keys: The number of keys to draw from.
        values: The number of values to draw from.
        times: The multiples of `length` at which validation and test are measured, each under the label of its length.
            The metric is the mean over all.

    Raises:
        InputError: A number is below 1; there are fewer keys than needles, fewer values than needles with a value, or
            more queries than needles; the haystack is too small or its length odd; or `times` are not distinct.

    Examples:
        >>> task = Needles(length=16, needles=2, words=10, keys=6, values=8, times=(1,))
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> batch.inputs, batch.targets[0, -2:]
        (tensor([[ 3,  9, 15, 20,  5,  4, 14, 23,  7,  4,  6,  3,  1,  4, 14, 15]]), tensor([23, 20]))

    References:
        Hsieh et al. 2024, arXiv:2404.06654. There, needles are sentences, and values are numbers of seven digits.
    """

    name: ClassVar[str] = "needles"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "of_each": 2, "queries": 2, "times": [1, 2]}

    length: int = 128
    needles: int = 4
    of_each: int = 1
    queries: int = 2
    words: int = 64
    keys: int = 32
    values: int = 64
    times: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("needles", "of_each", "queries", "words"):
            self.require(getattr(self, name) >= 1, name, "must be at least 1")
        count, asked = self.needles * self.of_each, self.queries * self.of_each
        self.require(self.queries <= self.needles, "queries", f"must be at most needles = {self.needles}")
        self.require(self.keys >= self.needles, "keys", f"must be at least needles = {self.needles}")
        least = max(2, count)
        self.require(self.values >= least, "values", f"must be at least needles x of_each = {least}")
        self.require(
            self.length >= 2 * count + asked,
            "length",
            f"must be at least 2 x needles x of_each + queries x of_each = {2 * count + asked}",
        )
        self.require(
            (self.length - asked) % 2 == 0,
            "length",
            f"must be {'even' if asked % 2 == 0 else 'odd'}, as queries x of_each",
        )
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")
        self.require(
            asked % 2 == 0 or all(times % 2 for times in self.times),
            "times",
            "must be odd for an odd number of queries x of_each",
        )

    @property
    def vocab_size(self) -> int:
        return self.words + self.keys + self.values

    @property
    def most_scored(self) -> int:
        return self.queries * self.of_each

    @property
    def chance(self) -> float:
        return 1 / self.values

    def evaluations(self) -> Mapping[str, Task]:
        if self.times == (1,):
            return {"": self}
        return {f"{self.length * n}": replace(self, length=self.length * n, times=(1,)) for n in self.times}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        count, asked = self.needles * self.of_each, self.queries * self.of_each
        hay = self.length - asked
        inputs = torch.empty(size, self.length, dtype=torch.int64, device=random.device)
        inputs[:, :hay] = random.integers("words", self.words, size, hay)
        keys = self.words + random.distinct("keys", self.keys, size, self.needles)
        values = self.words + self.keys + random.distinct("values", self.values, size, count)
        # The places of a key in their order, so that its values are v1 ... vm.
        place = random.distinct("places", hay // 2, size, count).view(size, self.needles, self.of_each)
        place = place.sort(dim=2).values.flatten(1)
        inputs.scatter_(1, 2 * place, keys.repeat_interleave(self.of_each, 1)).scatter_(1, 2 * place + 1, values)
        which = random.distinct("asked", self.needles, size, self.queries)
        answers = values.view(size, self.needles, self.of_each)
        answers = answers.gather(1, which[:, :, None].expand(-1, -1, self.of_each))
        inputs[:, hay:] = torch.cat([keys.gather(1, which)[:, :, None], answers[:, :, :-1]], dim=2).flatten(1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, hay:] = answers.flatten(1)
        return Batch(inputs, targets)
