"""Computes the mean of an arm over its seeds, and the share of seeds that learned, with their intervals.

`deltalab.statistics.joint_test` computes the differences to the base.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
"""The probability that an interval holds the value that it estimates."""

DRAWS = 2000
"""The number of draws of where the true means may lie."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its interval.

    Attributes:
        mean: The mean.
        low: The lower end of the 95% interval; NaN for a single seed.
        high: The upper end of the interval.
        n: The number of seeds.
        missing: How many of the n seeds did not finish. They count as the worst outcome.
    """

    mean: float
    low: float
    high: float
    n: int
    missing: int = 0


@dataclass(frozen=True)
class Share:
    """The share of seeds that learned, and its interval.

    Attributes:
        learned: The number of seeds that learned.
        n: The number of seeds.
        low: The lower end of the exact 95% interval of the share.
        high: The upper end of the interval.
    """

    learned: int
    n: int
    low: float
    high: float


def mean_interval(x: ArrayLike, bounds: tuple[float, float] | None = None, missing: int = 0) -> Interval:
    """Returns the mean of x [n] and its 95% t interval, mean +- t_{n-1} s / sqrt(n), for normal values.

    Args:
        x: The values, [n].
        bounds: The bounds of the metric, at which the interval is cut off.
        missing: How many of the values stand for seeds that did not finish.

    Returns:
        The interval. All its numbers are NaN if x is empty; low and high are NaN if x has a single value.

    Examples:
        >>> interval = mean_interval([0.5, 0.75, 1.0], bounds=(0, 1))
        >>> interval.mean, round(interval.low, 3), interval.high, interval.n
        (0.75, 0.129, 1, 3)
    """
    values = np.asarray(x, dtype=float)
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    low = high = math.nan
    if n > 1:
        margin = float(t_quantile(n) * values.std(ddof=1) / math.sqrt(n))
        low, high = within(mean - margin, mean + margin, bounds)
    return Interval(mean, low, high, n, missing)


def t_quantile(n: ArrayLike) -> NDArray[np.float64]:
    """Returns t_{n-1}, the factor of the standard error in the 95% interval of a mean of n values.

    Examples:
        >>> t_quantile([2, 8]).round(3)
        array([12.706,  2.365])
    """
    from scipy.special import stdtrit  # Imported here: plans need no SciPy. scipy.stats takes two seconds.

    quantiles: NDArray[np.float64] = stdtrit(np.asarray(n) - 1.0, (1 + LEVEL) / 2)
    return quantiles


def student_draws(x: ArrayLike, seed: int = 0) -> NDArray[np.float64]:
    """Returns the means of x [..., n] over its last axis, and draws of where the true means may lie.

    A draw is mean + sqrt((n - 1) / chi2) sum_s e_s (x_s - mean) / sqrt(n (n - 1)). e is normal, and chi2 has n - 1
    degrees of freedom. All means share e and chi2, so that draws are correlated over them as the values of a seed are.
    The middle 95% of the draws of one mean, or of any weighted sum of means, are its t interval.

    Args:
        x: The values; n is at least 2.
        seed: Draws with different seeds are independent.

    Returns:
        The means, and below them the draws: [1 + DRAWS, ...].

    References:
        Box and Tiao 1973, section 8.2: the posterior of the means of normal values.
    """
    values = np.asarray(x, dtype=float)
    n, random = values.shape[-1], np.random.default_rng(seed)
    mean = values.mean(-1)
    e = random.normal(size=(DRAWS, n)) * np.sqrt((n - 1) / random.chisquare(n - 1, size=(DRAWS, 1)))
    draws = np.tensordot(e / math.sqrt(n * (n - 1)), values - mean[..., None], (1, -1))
    return np.concatenate([mean[None], mean + draws])


def within(low: float, high: float, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """Cuts an interval off at the bounds of the quantity that it estimates."""
    return (max(low, bounds[0]), min(high, bounds[1])) if bounds else (low, high)


def share_learned(x: ArrayLike, threshold: float) -> Share:
    """Returns the share of values x [n] above a threshold, with its exact 95% interval.

    Examples:
        >>> share = share_learned([0.1, 0.9, 0.95, 1.0], 0.5)
        >>> share.learned, share.n, round(share.low, 3), round(share.high, 3)
        (3, 4, 0.194, 0.994)
    """
    values = np.asarray(x, dtype=float)
    learned = int((values > threshold).sum())
    return Share(learned, len(values), *share_interval(learned, len(values)))


def share_interval(k: int, n: int) -> tuple[float, float]:
    """Returns the exact 95% interval of a share, after k of n observations had the property.

    References:
        Clopper and Pearson 1934.
    """
    from scipy.special import betaincinv

    tail = (1 - LEVEL) / 2
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return low, high
