"""Pairs the runs of an arm with those of the base on the same seeds, and exchanges them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from deltalab.study.statistics.cross_fitting import Array, Sample

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

    @property
    def differences(self) -> Array:
        """The differences of the results of arm and base, [n]. A difference by rounding alone is 0."""
        of_arm, of_base = self.arm.results(), self.base.results()
        d = of_arm - of_base
        differences: Array = np.where(np.abs(d) <= _DUST * np.maximum(np.abs(of_arm), np.abs(of_base)), 0.0, d)
        return differences

    def head(self, seeds: int) -> "Pairs":
        """Returns the pairs of the first seeds."""
        return Pairs(self.arm.head(seeds), self.base.head(seeds))

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
        kept = signs > 0
        return self.arm.exchanged(self.base, kept).results() - self.base.exchanged(self.arm, kept).results()


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of several differences on the same seeds, such as a trend over sizes. They are exchanged together.

    Attributes:
        pairs: The runs that each difference compares.
        weights: The weight of each difference.
    """

    pairs: tuple[Pairs, ...]
    weights: tuple[float, ...]

    @property
    def seeds(self) -> int:
        """The number of seeds, n."""
        return self.pairs[0].seeds

    @property
    def differences(self) -> Array:
        """The contrast of each seed, [n]."""
        differences: Array = self.exchanged(np.ones((1, self.seeds)))[0]
        return differences

    def head(self, seeds: int) -> "Contrast":
        """Returns the contrast of the first seeds."""
        return Contrast(tuple(pairs.head(seeds) for pairs in self.pairs), self.weights)

    def exchanged(self, signs: Array) -> Array:
        """Returns the contrasts [E, n] after exchanging, as `Pairs.exchanged` does."""
        exchanged = np.zeros(signs.shape)
        for pairs, weight in zip(self.pairs, self.weights, strict=True):
            exchanged += weight * pairs.exchanged(signs)
        return exchanged


Paired = Pairs | Contrast
"""What a test by exchanges takes of an arm."""
