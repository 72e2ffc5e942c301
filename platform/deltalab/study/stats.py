"""The statistics of an answer: several arms against one base, on few seeds, paired by seed.

A value that is not finite is a seed that did not finish. It is left out and counted; nothing is filled in for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

EXACT_UP_TO = 16  # seeds; with more, the test draws 2^16 random sign flips instead of all


@dataclass(frozen=True)
class Interval:
    """A mean of `n` finished seeds and its interval; `missing` seeds did not finish."""

    mean: float
    low: float
    high: float
    n: int
    missing: int


@dataclass(frozen=True)
class Difference:
    """A mean of `n` paired differences with its interval; `missing` pairs lack a side.

    p_exact: two-sided exact sign-flip test. p_t: two-sided paired t test.
    """

    mean: float
    low: float
    high: float
    p_exact: float
    p_t: float
    n: int
    missing: int


def mean_interval(x: ArrayLike, level: float = 0.95) -> Interval:
    """The mean of x [n] and its t interval, mean +- t_{n-1} s / sqrt(n). It assumes normal values.

    All NaN where no seed finished. Where one did, low and high are NaN.

    >>> interval = mean_interval([1.0, 2.0, 3.0, float("nan")])
    >>> interval.mean, round(interval.high, 3), interval.n, interval.missing
    (2.0, 4.484, 3, 1)
    """
    from scipy import stats  # Load it here, since a plan needs none of it and it takes a second.

    values = np.asarray(x, dtype=float)
    finished = values[np.isfinite(values)]
    n = len(finished)
    mean = float(finished.mean()) if n else math.nan
    low = high = math.nan
    if n > 1:
        margin = float(stats.t.ppf((1 + level) / 2, n - 1) * stats.sem(finished))
        low, high = mean - margin, mean + margin
    return Interval(mean, low, high, n, len(values) - n)


def paired(x: ArrayLike, base: ArrayLike, level: float = 0.95) -> Difference:
    """x - base over paired seeds [n]: mean, t interval, and the exact and the t test of "no difference".

    Only seeds that finished on both sides count. The exact test assumes that under "no difference" the sign
    of each difference is a coin flip; the t test and the interval, that the differences are normal.
    All NaN where there is no pair. With one pair, low and high are NaN and p_exact is 1. Where all differences are
    equal, the interval has width zero and p_t is NaN, since their spread is unknown rather than zero.
    Raises `ValueError` for unequal lengths.

    >>> difference = paired([0.9, 0.8, 0.7], [0.8, 0.6, 0.4])
    >>> round(difference.mean, 9), difference.p_exact, round(difference.p_t, 3), difference.n
    (0.2, 0.25, 0.074, 3)
    """
    from scipy import stats

    left, right = np.asarray(x, dtype=float), np.asarray(base, dtype=float)
    if left.shape != right.shape:
        raise ValueError(f"paired by seed: {left.shape} values against {right.shape}")
    both = np.isfinite(left) & np.isfinite(right)
    left, right = left[both], right[both]
    n = len(left)
    # Take as equal what differs by rounding alone, which the tests would magnify.
    scale = np.abs([left, right]).max(initial=0)
    differences = np.where(np.abs(left - right) > 1e-12 * scale, left - right, 0.0)
    interval = mean_interval(differences, level)
    p_exact, p_t = (1.0 if n else math.nan), math.nan
    if n > 1:
        # Sums of whole numbers do not depend on their order, so that equal sums compare as equal.
        largest = np.abs(differences).max() or 1.0
        test = stats.permutation_test(
            (np.rint(differences / largest * 2**40),),
            np.sum,
            permutation_type="samples",
            n_resamples=2 ** min(n, EXACT_UP_TO),
            vectorized=True,
            rng=0,
        )
        p_exact = float(test.pvalue)
        if np.ptp(differences) > 1e-12 * scale:
            p_t = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return Difference(interval.mean, interval.low, interval.high, p_exact, p_t, n, len(both) - n)


def interaction(base: ArrayLike, a: ArrayLike, b: ArrayLike, ab: ArrayLike, level: float = 0.95) -> Difference:
    """(ab - a) - (b - base), paired by seed: how far the changes a and b together are from their sum.

    >>> round(interaction(base=[0.0, 0.1], a=[0.5, 0.7], b=[0.2, 0.2], ab=[0.7, 0.9]).mean, 9)
    0.05
    """
    values = [np.asarray(arm, dtype=float) for arm in (base, a, b, ab)]
    return paired(values[3] - values[1], values[2] - values[0], level)


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's step-down correction of p-values that are tested together.

    NaN, for an arm that could not be compared, stays NaN and still counts as a test.

    >>> holm([0.01, 0.04, float("nan")])
    [0.03, 0.08, nan]
    """
    if not ps:
        return []
    from statsmodels.stats.multitest import multipletests

    given = np.asarray(ps, dtype=float)
    corrected = multipletests(np.nan_to_num(given, nan=1.0), method="holm")[1]
    return [float(p) for p in np.where(np.isnan(given), math.nan, corrected)]


def simultaneous_level(comparisons: int, level: float = 0.95) -> float:
    """The level of each of several intervals such that all hold together with `level` (Bonferroni).

    Holm has no simple intervals of its own; these are somewhat wider than its tests would give.

    >>> round(simultaneous_level(5), 9)
    0.99
    """
    return 1 - (1 - level) / max(comparisons, 1)


def smallest_p(n: int) -> float:
    """The least p that the exact sign-flip test of n pairs can give: 2 / 2^n.

    >>> smallest_p(5), smallest_p(8)
    (0.0625, 0.0078125)
    """
    return min(1.0, 2.0 ** (1 - n))


def smallest_holm_p(n: int, arms: int) -> float:
    """The least p after Holm over `arms` comparisons of n pairs each.

    >>> smallest_holm_p(8, arms=5)
    0.0390625
    """
    return min(1.0, arms * smallest_p(n))


def seeds_needed(arms: int, alpha: float = 0.05) -> int:
    """The fewest seeds with which an arm can reach `alpha` after Holm over `arms` comparisons.

    >>> seeds_needed(1), seeds_needed(5)
    (6, 8)
    """
    n = 1
    while smallest_holm_p(n, arms) > alpha:
        n += 1
    return n
