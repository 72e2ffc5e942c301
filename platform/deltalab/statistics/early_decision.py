"""Estimates the difference of an arm without the optimism of an early decision.

A look decides an arm whose mean difference is large so far, so that the means of arms that were decided early tend to
be too large. The estimate here takes into account which look decided an arm. It is the true difference delta with which

    P(mean > observed mean | the same look decides the arm; delta) = 1/2

so that half of the estimates of each look are above the truth (conditional median-unbiased). The last look counts as
deciding every arm. If it is the only one, the estimate is the mean. An arm that was barely decided has next to nothing.

The probability is that of normal differences whose variance is that of Student's t for the sd s of the n differences,
s^2 (n - 1) / (n - 3). The means at the looks are a random walk, whose density is integrated from look to look
(Armitage, McPherson and Rowe 1969) over the means with which an arm goes on. What these are, the intervals say: had the
mean been other by so much that its interval left out 0, the look would have decided the arm.

References:
    Troendle and Yu 1999, Communications in Statistics 28, on estimates given the look at which a trial stopped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)
"""The nodes and weights of the integral over a range of means."""
FARTHEST = 20.0
"""How many standard errors off the observed mean the integrals end."""
HALVINGS = 40
"""How often the range of possible estimates is halved."""
_DUST = 1e-12
"""A standard deviation below this share of the mean counts as a rounding error."""


@dataclass(frozen=True)
class Boundaries:
    """Where a look stops an arm.

    Attributes:
        seeds: The number of seeds.
        decided: The |mean| from which on the look decides the arm; 0 at the last look, which stops every arm.
        given_up: The least and the largest |mean| with which it gives up an arm that it does not decide; infinite if it
            gives up none.
    """

    seeds: int
    decided: float
    given_up: tuple[float, float]


def reach(mean: float, low: float, high: float) -> float:
    """Returns how far an interval [low, high] reaches from the mean towards 0 and beyond."""
    return mean - low if mean > 0 else high - mean


def futility(d: Array, margin: float, share: float, level: float, least: float) -> tuple[float, float]:
    """Returns the least and the largest |mean| with which an arm has too little prospect.

    The prospect is the conditional power: the probability that the arm is decided at the last look if its trend
    continues. With z the normal quantile of a t test so far, and z_end that of the last look, it is

        Phi((z / sqrt(share) - z_end) / sqrt(1 - share))

    The test is whether the mean differs from 0, to either side, or whether it is within the margin.

    Args:
        d: The differences so far, [n].
        margin: The least difference that matters.
        share: The share of n in the seeds of the last look.
        level: The level of the test of an arm at the last look.
        least: The least prospect with which an arm goes on.
    """
    from scipy.special import ndtr, ndtri, stdtrit  # Imported here: plans need no SciPy.

    def off(level: float) -> float:
        """How far |mean| is off 0, or off the margin, where the prospect is the least."""
        z = math.sqrt(share) * (math.sqrt(1 - share) * ndtri(least) - ndtri(level))
        return float(-stdtrit(len(d) - 1, ndtr(-z)) * d.std(ddof=1) / math.sqrt(len(d)))

    return margin - off(level), off(level / 2)


def unbiased(d: Array, looks: Sequence[Boundaries], low: float, high: float) -> float:
    """Estimates the difference of an arm that a look decided, or that the last look stopped.

    Args:
        d: The differences at that look, [n].
        looks: The boundaries of the looks up to that one.
        low: The lower end of the interval.
        high: The upper end. An estimate beyond an end is the end.

    Returns:
        The estimate.
    """
    n, mean, sd = len(d), float(d.mean()), float(d.std(ddof=1))
    if sd <= _DUST * abs(mean):
        return mean
    variance = sd**2 * (n - 1) / max(n - 3, 1)
    means, shares = _final_means(mean, math.sqrt(variance), looks)
    larger = means > mean
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        # The density with another true difference is the same, times exp(n mean difference / variance).
        tilt = n * (means - mean) * (middle - mean) / variance
        tilted = shares * np.exp(tilt - tilt.max())
        if tilted[larger].sum() < tilted[~larger].sum():
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _final_means(mean: float, sd: float, looks: Sequence[Boundaries]) -> tuple[Array, Array]:
    """Integrates the density of the means that the last of the looks decides if the observed mean is the truth.

    Args:
        mean: The observed mean.
        sd: The standard deviation of a difference.
        looks: The boundaries of the looks so far.

    Returns:
        The means, and the share of each in the integral, up to a factor.
    """
    at, shares, before = np.zeros(1), np.ones(1), 0
    for look in looks:
        least, largest = look.given_up
        sizes = [(0.0, min(least, look.decided)), (max(least, largest), look.decided)]  # with which an arm goes on
        if look is looks[-1]:
            sizes = [(look.decided, abs(mean)), (max(look.decided, abs(mean)), math.inf)]
        means, weights = _nodes(sizes, mean, FARTHEST * sd / math.sqrt(look.seeds))
        added = look.seeds - before
        expected = (before * at + added * mean) / look.seeds
        off = (means[:, None] - expected) * look.seeds / (sd * math.sqrt(added))
        at, shares, before = means, weights * (np.exp(-(off**2) / 2) @ shares), look.seeds
    return at, shares


def _nodes(sizes: Sequence[tuple[float, float]], centre: float, widest: float) -> tuple[Array, Array]:
    """Returns the nodes and weights of an integral over means whose size is in one of several ranges.

    Args:
        sizes: The ranges of the absolute mean, (low, high) each.
        centre: The middle of the means that are integrated over.
        widest: The greatest distance of a mean from the centre.
    """
    ranges = [part for low, high in sizes if low < high for part in ((-high, -low), (low, high))]
    ends = [(max(low, centre - widest), min(high, centre + widest)) for low, high in ranges]
    halves = np.array([[(high + low) / 2, (high - low) / 2] for low, high in ends if low < high]).reshape(-1, 2)
    return (halves[:, :1] + halves[:, 1:] * NODES).ravel(), (halves[:, 1:] * WEIGHTS).ravel()
