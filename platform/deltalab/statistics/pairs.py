"""Pairs the runs of an arm with those of the base on the same seeds, and exchanges them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from deltalab.statistics.cross_fitting import Array, Sample
from deltalab.statistics.interquartile import interquartile_parts

AT_ONCE = 2**17
"""The scores that are weighed at once after an exchange: a core's cache holds them, and memory many times more."""
_DUST = 1e-12
"""A difference smaller than this share of its terms counts as a rounding error."""


@dataclass(frozen=True)
class Pairs:
    """The runs of an arm and of the base on the same seeds.

    Attributes:
        arm: The runs of the arm, on n seeds with C candidates.
        base: The runs of the base, as many.
    """

    arm: Sample
    base: Sample

    @classmethod
    def plain(cls, differences: ArrayLike) -> "Pairs":
        """Returns pairs of seeds without tuning, whose differences [n] are given."""
        d = np.atleast_1d(np.asarray(differences, dtype=float))[:, None]
        return cls(Sample(d, d), Sample(np.zeros_like(d), np.zeros_like(d)))

    @property
    def seeds(self) -> int:
        """The number of pairs, n."""
        return self.arm.seeds

    @cached_property
    def differences(self) -> Array:
        """The differences of the results of arm and base, [n]. A difference by rounding alone is 0."""
        of_arm, of_base = self.arm.results(), self.base.results()
        d = of_arm - of_base
        differences: Array = np.where(np.abs(d) <= _DUST * np.maximum(np.abs(of_arm), np.abs(of_base)), 0.0, d)
        return differences

    def head(self, seeds: int) -> "Pairs":
        """Returns the pairs of the first seeds."""
        return self if seeds >= self.seeds else Pairs(self.arm.head(seeds), self.base.head(seeds))

    def normalized(self, chance: float, perfect: float) -> "Pairs":
        """Returns the pairs with every score on a scale where `chance` is 0 and `perfect` is 1."""
        return Pairs(self.arm.normalized(chance, perfect), self.base.normalized(chance, perfect))

    def exchanged(self, signs: Array) -> Array:
        """Returns the differences [E, n] after exchanging arm and base at the seeds whose sign is negative.

        Every seed is then weighed anew. A number that is subtracted from all of the arm's scores is subtracted from the
        scores of all candidates of a seed alike, and changes no weight: it changes a difference by the number times the
        sign.

        Args:
            signs: The signs of the seeds, [E, n].
        """
        if self.arm.candidates == 1:
            return self.differences * signs
        arm, base = self.results(signs)
        return arm - base

    def results(self, signs: Array) -> tuple[Array, Array]:
        """Returns the results of arm and base, each [E, n], after the same exchange."""
        size = max(1, AT_ONCE // self.arm.test.size)
        parts = [signs[first : first + size] > 0 for first in range(0, len(signs), size)]
        arm, base = (
            np.concatenate([one.exchanged(other, kept).results() for kept in parts])
            for one, other in ((self.arm, self.base), (self.base, self.arm))
        )
        return arm, base


@dataclass(frozen=True)
class _Several(ABC):
    """A difference that several pairs on the same seeds make together. They are exchanged together."""

    pairs: tuple[Pairs, ...]

    @property
    def seeds(self) -> int:
        """The number of seeds, n."""
        return self.pairs[0].seeds

    @cached_property
    def differences(self) -> Array:
        """The difference of each seed, [n]."""
        differences: Array = self.exchanged(np.ones((1, self.seeds)))[0]
        return differences

    def head(self, seeds: int) -> Self:
        """Returns the same of the first seeds."""
        return self if seeds >= self.seeds else replace(self, pairs=tuple(pairs.head(seeds) for pairs in self.pairs))

    @abstractmethod
    def exchanged(self, signs: Array) -> Array:
        """Returns the differences [E, n] after exchanging, as `Pairs.exchanged` does."""


@dataclass(frozen=True)
class Contrast(_Several):
    """A weighted sum of several differences on the same seeds, such as a trend over sizes.

    Attributes:
        pairs: The runs that each difference compares.
        weights: The weight of each difference.
    """

    weights: tuple[float, ...]

    def exchanged(self, signs: Array) -> Array:
        """Returns the contrasts [E, n] after exchanging."""
        exchanged = np.zeros(signs.shape)
        for pairs, weight in zip(self.pairs, self.weights, strict=True):
            exchanged += weight * pairs.exchanged(signs)
        return exchanged


@dataclass(frozen=True)
class InterquartileContrast(_Several):
    """The interquartile mean of an arm over tasks and seeds, minus that of the base.

    A seed's difference is that of its `interquartile_parts`; its mean over seeds is the difference of the two means.
    After an exchange both means are computed anew, so that the test is exact.

    Attributes:
        pairs: The runs on each task, on the same seeds and in the same unit.
    """

    def exchanged(self, signs: Array) -> Array:
        """Returns the differences [E, n] after exchanging."""
        by_task = [pairs.results(signs) for pairs in self.pairs]
        arm, base = (np.stack(results, axis=-1) for results in zip(*by_task, strict=True))
        return interquartile_parts(arm) - interquartile_parts(base)


Paired = Pairs | Contrast | InterquartileContrast
"""What a test by exchanges takes of an arm."""
