"""Weighs each seed's runs by the validation scores of other seeds, so that no seed is rewarded for its own luck.

The best of several runs is better than the setting that it was trained with: an arm whose runs vary more would gain
from choosing among its own. So the other seeds choose (cross-fitting). They weigh the candidates: one that is clearly
worse has no weight, and those that cannot be told apart are averaged. With m_c the mean validation score of candidate c
over the other seeds, b the best of the candidates, and e the standard error of a difference m_b - m_c,

    w_c = exp(-(m_b - m_c) / e) / sum_c' exp(-(m_b - m_c') / e)
    result = sum_c w_c (test score of the seed's run of c)

e is the lower median over the candidates other than b: one that fails with some seeds does not make the others harder
to tell apart. Two seeds have no standard error: each takes what is best with the other.

Results of different seeds share what they weigh by, so they are no independent numbers. The tests therefore exchange
whole seeds, all their runs, between an arm and the base, and weigh anew after every exchange.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
_DUST = 1e-12
"""A number smaller than this share of the squares that it comes from counts as a rounding error."""


@dataclass(frozen=True)
class Sample:
    """The runs of one arm on n seeds, each of which trained C candidates.

    Attributes:
        validation: The validation scores, [n, C]. With a single candidate they are not used.
        test: The test scores, [n, C].
        maximize: Whether more is better.
        block: How many seeds weigh for one another, where there are more: each block of so many in a row. The last
            block takes seeds of the one before if they do not come out even. None if all seeds weigh for one another.
    """

    validation: Array
    test: Array
    maximize: bool = True
    block: int | None = None

    @property
    def seeds(self) -> int:
        """The number of seeds, n."""
        return len(self.test)

    @property
    def candidates(self) -> int:
        """The number of candidates, C."""
        return int(self.test.shape[-1])

    def head(self, seeds: int) -> "Sample":
        """Returns the runs of the first seeds."""
        return replace(self, validation=self.validation[:seeds], test=self.test[:seeds])

    def shifted(self, by: float) -> "Sample":
        """Returns the runs with a number added to every score."""
        return replace(self, validation=self.validation + by, test=self.test + by)

    def normalized(self, chance: float, perfect: float) -> "Sample":
        """Returns the runs with every score on a scale where `chance` is 0 and `perfect` is 1, so that more is better.

        The weights stay as they are.
        """
        scale = perfect - chance
        return Sample((self.validation - chance) / scale, (self.test - chance) / scale)

    def widened(self, candidates: int) -> "Sample":
        """Returns the runs with the candidates repeated until there are as many as given.

        An arm without tuning has one candidate, however it is weighed.
        """
        return self.among(np.arange(max(candidates, self.candidates)) % self.candidates)

    def among(self, columns: ArrayLike) -> "Sample":
        """Returns the runs of some of the candidates, [..., n, k], whose columns are given, [..., k]."""
        chosen = np.asarray(columns)
        validation, test = (np.moveaxis(scores[:, chosen], 0, -2) for scores in (self.validation, self.test))
        return replace(self, validation=validation, test=test)

    def exchanged(self, other: "Sample", kept: NDArray[np.bool_]) -> "Sample":
        """Returns this arm's runs of the seeds that are kept, [..., n], and the other arm's of the rest."""
        own = kept[..., None]
        validation = np.where(own, self.validation, other.validation)
        return replace(self, validation=validation, test=np.where(own, self.test, other.test))

    def results(self) -> Array:
        """Returns the results of the seeds, [..., n].

        Examples:
            >>> validation = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.9]])
            >>> Sample(validation, np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).results().round(3)
            array([2.   , 3.464, 5.464])
        """
        if self.candidates == 1:
            return self.test[..., 0]
        results: Array = (self.weights() * self.test).sum(-1)
        return results

    def weights(self) -> Array:
        """Returns the weights w that the other seeds of each seed give the candidates, [..., n, C]."""
        n, block = self.test.shape[-2], self.block
        if block is not None and block < n:
            firsts = np.minimum(np.arange(0, n, block), n - block)
            seeds = firsts[:, None] + np.arange(block)
            validation, test = self.validation[..., seeds, :], self.test[..., seeds, :]
            in_blocks = replace(self, validation=validation, test=test).weights()
            at = np.minimum(np.arange(n) // block, len(firsts) - 1)
            of_seeds: Array = in_blocks[..., at, np.arange(n) - firsts[at], :]
            return of_seeds
        scores = self.validation if self.maximize else -self.validation
        sums = _others(scores)
        return _weights(sums, self._errors(scores, sums))

    def _errors(self, scores: Array, sums: Array) -> Array:
        """The standard errors e by which each seed weighs, [..., n]; 0 with fewer than two other seeds.

        Args:
            scores: The scores, [..., n, C].
            sums: Their sums over a seed's other seeds, [..., n, C].
        """
        n, candidates = scores.shape[-2:]
        if n < 3 or candidates < 2:
            return np.zeros(scores.shape[:-1])
        best = sums.argmax(-1)[..., None]
        scores = scores - scores.mean((-2, -1), keepdims=True)
        means = _others(scores) / (n - 1)
        squares = scores**2
        squares = squares.sum(-2, keepdims=True) - squares  # of the other seeds, [..., n, C]
        with_best = _products(scores, best)
        gaps = np.take_along_axis(means, best, -1) - means
        spread = (squares + np.take_along_axis(squares, best, -1) - 2 * with_best) / (n - 1) - gaps**2
        spread = np.where(spread > _DUST * squares.max(-1, keepdims=True), spread, 0.0)
        np.put_along_axis(spread, best, np.inf, -1)  # The best has no difference to itself.
        middle = (candidates - 2) // 2
        lower_median = np.partition(spread, middle, axis=-1)[..., middle]
        errors: Array = np.sqrt(lower_median / (n - 2))
        return errors


def _products(scores: Array, best: NDArray[np.intp]) -> Array:
    """The sums over a seed's other seeds of the scores times those of the seed's best candidate, [..., n, C].

    Args:
        scores: The scores, [..., n, C].
        best: The best candidate of each seed, [..., n, 1].
    """
    n, candidates = scores.shape[-2:]
    if candidates <= n:
        products = scores[..., :, None] * scores[..., None, :]
        products = products.sum(-3, keepdims=True) - products  # [..., n, C, C]
        pairs: Array = np.take_along_axis(products, best[..., None], -1)[..., 0]
        return pairs
    # All pairs of candidates would be more than the seeds' best ones need: n * n * C products, not n * C * C.
    of_best = np.take_along_axis(scores[..., None, :, :], best[..., None], -1)  # by seed and other seed, [..., n, n, 1]
    products = of_best * scores[..., None, :, :]
    own = np.arange(n)
    sums: Array = products.sum(-2) - products[..., own, own, :]
    return sums


def _others(scores: Array) -> Array:
    """The sums over a seed's other seeds, [..., n, C]; a single seed has its own scores."""
    if scores.shape[-2] < 2:
        return scores
    # Add what is before a seed and what is after it: the sum of all, minus its own, would break ties by rounding.
    others = np.zeros_like(scores)
    others[..., 1:, :] += scores[..., :-1, :].cumsum(-2)
    others[..., :-1, :] += scores[..., :0:-1, :].cumsum(-2)[..., ::-1, :]
    return others


def _weights(sums: Array, errors: Array) -> Array:
    """The weights of candidates by sums over the other seeds; with an error of 0, the best share the weight."""
    means = sums / max(sums.shape[-2] - 1, 1)
    gaps = means.max(-1, keepdims=True) - means
    sure = errors[..., None] == 0
    weights = np.where(sure, gaps == 0, np.exp(-gaps / np.where(sure, 1.0, errors[..., None])))
    shares: Array = weights / weights.sum(-1, keepdims=True)
    return shares
