"""Compares models item by item, over all their tasks at once, with intervals that hold together.

Two models answered the same n items. Of each model, a metric is R = sum_i t_i / sum_i w_i; for a mean, w_i = 1. To
first order, an item moves the difference of the two by

    z_i = (t_i - R w_i) / sum w  of the one model, less that of the other,    se = sqrt(n / (n - 1) sum_i z_i^2)

(the delta method). Metrics, tasks and models that have items in common have correlated differences:
r = sum_i z_i z'_i / sqrt(sum_i z_i^2 sum_i z'_i^2). The factor q of se in all intervals is the 95% quantile of the
largest |T| of normal values T with these correlations (max-T), drawn `DRAWS` times (Hothorn, Bretz and Westfall 2008).
To draw T is to give each item a normal weight, which is the multiplier bootstrap of Chernozhukov, Chetverikov and Kato
(2013). Weights of +1 and -1, by which `joint_test` flips seeds, make intervals too short here: where one item of 200
differs, |T| is 1 under every flip. Student's t with n - 1 degrees of freedom puts q on the scale of each difference, so
that a task of few items does not widen the intervals of others.

Of scores such as right and wrong, most items are *ties*, with the same score of both models, and a difference may rest
on two or three. If all agree, se is 0 although the next item need not. So the variance of a metric within [0, 1] that
has ties is that of its items and of q^2 more that differ by 1. This takes the place of Student's t.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltalab.statistics.intervals import within
from deltalab.statistics.joint_test import ALPHA, Difference

DRAWS = 20_000
"""The draws of T. Their 95% quantile has the level 0.95 to within 0.0016."""
CORRECTIONS = np.linspace(0, 1, 9)
"""The shares of the largest skewness that an interval allows for."""
FEW, SKEWED = 24, 1.0
"""Fewer items than `FEW` whose skewness is above `SKEWED` have intervals that may be too short: of six differences that
are lognormal, all intervals held in 0.93 of evaluations with 12 items; of 40, in 0.87 with 16 and 0.94 with 24."""
LEAST = 6
"""The fewest items that have an interval, as many as the seeds of an arm need."""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ItemPairs:
    """A metric of the same items for two models.

    Attributes:
        ids: What tells the items apart, [n]. Equal ids, also in other pairs, are the same item.
        first: The totals and the weights of the items for the model that others are compared with, [n, 2].
        other: The totals and the weights for the other model, [n, 2].
    """

    ids: Sequence[str]
    first: Array
    other: Array


def compare_items(pairs: Sequence[ItemPairs]) -> list[Difference]:
    """Compares models on all metrics together.

    Args:
        pairs: The items of each comparison, at least `LEAST` different ones of each.

    Returns:
        For each comparison the value of the other model less that of the first, with an interval. All intervals hold
        together with 95%, and p is that of the whole family.

    Examples:
        >>> right = np.array([[1.0, 1.0]] * 60)
        >>> wrong = np.array([[0.0, 1.0]] * 20 + [[1.0, 1.0]] * 40)
        >>> [found] = compare_items([ItemPairs([str(i) for i in range(60)], right, wrong)])
        >>> round(found.mean, 3), found.decided, found.n
        (-0.333, True, 60)
    """
    if not pairs:
        return []
    from scipy.special import ndtr, ndtri, stdtr, stdtrit  # Imported here: scipy takes its time.

    moves = [_Moves.of(pair) for pair in pairs]
    largest = np.sort(_largest(_correlations(moves)))
    quantile = largest[math.ceil((1 - ALPHA) * (DRAWS + 1)) - 1]
    found = []
    for move in moves:
        if move.tie:
            factor = float(quantile)
            se = math.sqrt(move.variance + factor**2 * move.tie)
            at_0 = abs(move.difference) / se
            bounds = within(move.difference - factor * se, move.difference + factor * se, (-1.0, 1.0))
        else:
            degrees, se = len(move.ids) - 1, math.sqrt(move.variance)
            factor = float(-stdtrit(degrees, ndtr(-quantile)))
            low, high = move.ends(factor)
            bounds = move.difference - se * high, move.difference - se * low
            at_0 = float(-ndtri(stdtr(degrees, -move.evidence(move.difference / se if se else 0.0))))
        reached = DRAWS - np.searchsorted(largest, at_0 * (1 - 1e-9))
        found.append(Difference(move.difference, *bounds, (1 + int(reached)) / (1 + DRAWS), len(move.ids)))
    return found


def too_skewed(pair: ItemPairs) -> bool:
    """Returns whether items are too few for their skewness, so that the interval may be too short."""
    move = _Moves.of(pair)
    return not move.tie and len(move.ids) < FEW and abs(move.skewness) > SKEWED


@dataclass(frozen=True)
class _Moves:
    """By how much each item moves a difference.

    Attributes:
        difference: The difference.
        ids: The items, each once, [n].
        z: How far each of them moves it, [n].
        tie: The variance that one more item that differs by 1 adds; 0 if there are no ties.
    """

    difference: float
    ids: NDArray[np.str_]
    z: Array
    tie: float

    @classmethod
    def of(cls, pair: ItemPairs) -> "_Moves":
        values, moves, scores = [], [], []
        for totals, weights in (pair.first.T, pair.other.T):
            values.append(float(totals.sum() / weights.sum()))
            moves.append((totals - values[-1] * weights) / weights.sum())
            scores.append(totals / weights)
        tie, weights = 0.0, pair.first[:, 1]
        if np.min(scores) >= 0 and np.max(scores) <= 1 and (scores[0] == scores[1]).any():
            tie = float((weights**2).mean() / weights.sum() ** 2)
        ids, places = np.unique(np.asarray(pair.ids), return_inverse=True)
        z: Array = np.bincount(places, moves[1] - moves[0]).astype(np.float64)
        return cls(values[1] - values[0], ids, z, tie)

    @property
    def variance(self) -> float:
        """The variance of the difference."""
        n = len(self.z)
        return float((self.z**2).sum()) * n / (n - 1)

    @property
    def skewness(self) -> float:
        """The skewness of the items."""
        spread = math.sqrt(float((self.z**2).mean()))
        return float(((self.z / spread) ** 3).mean()) if spread else 0.0

    @property
    def _a(self) -> Array:
        """The skewness of t, as little and as much as there may be."""
        n = len(self.z)
        return CORRECTIONS * ((1.5 + 16 / n) * self.skewness / math.sqrt(n))

    def evidence(self, t: float) -> float:
        """Returns |g(t)| with the skewness that makes it least; 0 if g(t) and t have not the same sign."""
        a = self._a
        g = t + a * t**2 / 3 + a**2 * t**3 / 27 + a / 6
        return max(0.0, float((math.copysign(1.0, t) * g).min()))

    def ends(self, factor: float) -> tuple[float, float]:
        """Returns the least and the largest t with |g(t)| = `factor`, over all skewnesses."""
        low, high = (self._solved(x) for x in (-factor, factor))
        return float(low.min()), float(high.max())

    def _solved(self, x: float) -> Array:
        """The t with g(t) = x, for each skewness."""
        moved = x - self._a / 6
        root = np.cbrt(1 + self._a * moved)
        # (root - 1) * 3 / a, without a division by a skewness of 0
        solved: Array = 3 * moved / (root**2 + root + 1)
        return solved


def _correlations(moves: Sequence[_Moves]) -> Array:
    """Returns the correlations of the differences, [H, H]. A difference that no item moves correlates with none."""
    from scipy.sparse import csr_array

    ids, items = np.unique(np.concatenate([move.ids for move in moves]), return_inverse=True)
    sizes = [math.sqrt(float((move.z**2).sum())) for move in moves]
    scaled = np.concatenate([move.z / size if size else move.z for move, size in zip(moves, sizes, strict=True)])
    rows = np.repeat(np.arange(len(moves)), [len(move.ids) for move in moves])
    z = csr_array((scaled, (rows, items)), shape=(len(moves), len(ids)))
    correlations: Array = (z @ z.T).toarray()
    np.fill_diagonal(correlations, 1.0)
    return correlations


def _largest(correlations: Array) -> Array:
    """Returns the largest absolute value of normal variables with these correlations, of each draw, [DRAWS]."""
    values, vectors = np.linalg.eigh(correlations)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    normal = np.random.default_rng(0).standard_normal((DRAWS, len(root)))
    largest: Array = np.abs(normal @ root.T).max(1)
    return largest
