"""The mean of an arm over its seeds, and the share of seeds that learned.

Differences to the base are in `deltalab.study.statistics.joint_test`.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean of n seeds and its interval. missing: how many of them did not finish and count as the worst outcome."""

    mean: float
    low: float
    high: float
    n: int
    missing: int = 0


@dataclass(frozen=True)
class Share:
    """How many of n seeds learned, and the exact interval of the share that does."""

    learned: int
    n: int
    low: float
    high: float


def mean_interval(x: ArrayLike, bounds: tuple[float, float] | None = None, missing: int = 0) -> Interval:
    """The mean of x [n] and its 95% t interval, mean +- t_{n-1} s / sqrt(n), cut off at the bounds of the metric.

    It assumes normal values. All NaN without a value; low and high are NaN with one.

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
    """t_{n-1}, the factor of the standard error in the 95% interval of a mean of n values.

    >>> t_quantile([2, 8]).round(3)
    array([12.706,  2.365])
    """
    from scipy.special import stdtrit  # scipy.stats would take two seconds to load, and a plan needs neither

    found: NDArray[np.float64] = stdtrit(np.asarray(n) - 1.0, (1 + LEVEL) / 2)
    return found


def within(low: float, high: float, bounds: tuple[float, float] | None) -> tuple[float, float]:
    """An interval, cut off at the bounds of what it estimates."""
    return (max(low, bounds[0]), min(high, bounds[1])) if bounds else (low, high)


def share_learned(x: ArrayLike, threshold: float) -> Share:
    """The share of values x [n] above a threshold, with its exact 95% interval (Clopper and Pearson 1934).

    >>> share = share_learned([0.1, 0.9, 0.95, 1.0], 0.5)
    >>> share.learned, share.n, round(share.low, 3), round(share.high, 3)
    (3, 4, 0.194, 0.994)
    """
    values = np.asarray(x, dtype=float)
    learned = int((values > threshold).sum())
    return Share(learned, len(values), *share_interval(learned, len(values)))


def share_interval(k: int, n: int) -> tuple[float, float]:
    """The exact 95% interval of a share of which k of n were seen (Clopper and Pearson 1934)."""
    from scipy.special import betaincinv

    tail = (1 - LEVEL) / 2
    low = float(betaincinv(k, n - k + 1, tail)) if k else 0.0
    high = float(betaincinv(k + 1, n - k, 1 - tail)) if k < n else 1.0
    return low, high
