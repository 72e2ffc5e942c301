"""Tests arms against a base that has more seeds than they, each arm apart, and inverts the test into intervals.

The base takes part in every comparison, so that its runs are worth more than those of an arm. Its further seeds have no
pair. So the results of arm j, n of them, are compared with the b > n results of the base as two groups,

    D = mean(results of the arm) - mean(results of the base)

If the arm computes what the base does, any n of the n + b runs may as well be the arm's. p_1 is the share of
relabellings of the runs whose |D| is at least the observed |D| (Fisher and Pitman's test). It is exact for any
distribution if the runs of a seed do not depend on one another. If the runs of a seed resemble one another, D varies
less than under relabellings, and the test errs less often.

Relabelled runs all vary alike. An arm that is noisier than the base would be found different too often for that alone,
though its mean is that of the base. So p_2 is that of Welch's t test, which allows for it,

    t = D / sqrt(v / n + s_0^2 / b),    v = max(s_j^2, (s_j^2 + m_j) / 2)

with s_0^2 and s_j^2 the variances of the results of base and arm, and m_j the median variance of the other arms in the
same unit. It keeps n results that are close by luck from counting as an arm of little noise, and gives v the 2 (n - 1)
degrees of freedom of two variances. For m arms that are tested together

    p = min(1, m max(p_1, p_2))

which no dependence between arms can make err more often (Bonferroni). As a maximum it stays exact where p_1 is.
An effect that shifts all of an arm's results alike changes D under every relabelling by a known multiple. So both tests
are inverted in closed form, and the interval is the longer one to either side.

A seed that tunes has its runs weighed anew after every relabelling (`cross_fitting`). Both groups weigh by n - 1 other
seeds: a base that chose by more seeds would choose better.

References:
    Hemerik and Goeman 2018, Test 27: relabellings drawn by lot beside the observed one keep the test exact.
    Welch 1947, Biometrika 34.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalab.statistics.cross_fitting import Array, Sample
from deltalab.statistics.joint_test import ALPHA, Difference

RELABELLINGS = 2**12
"""How many relabellings p_1 counts, the observed one among them. The rest are drawn once, so that p can be repeated."""
AT_ONCE = 2**8
"""How many relabellings weigh candidates at a time."""
_TIED = 1e-9
"""Two differences that differ by less than this share count as equal, since they differ by rounding alone."""


@dataclass(frozen=True)
class Groups:
    """The runs of an arm, and those of the base.

    Attributes:
        arm: The runs of the arm, on n seeds with C candidates.
        base: The runs of the base, on b seeds with as many candidates.
    """

    arm: Sample
    base: Sample

    @classmethod
    def plain(cls, arm: ArrayLike, base: ArrayLike) -> "Groups":
        """Returns the groups of seeds without tuning, whose results [n] and [b] are given."""
        one, other = (np.asarray(results, dtype=float)[:, None] for results in (arm, base))
        return cls(Sample(one, one), Sample(other, other))

    @property
    def results(self) -> tuple[Array, Array]:
        """The results of the arm, [n], and those of the base, [b], each weighed by n - 1 other seeds."""
        return self.arm.results(), replace(self.base, block=self.arm.seeds).results()

    def relabelled(self) -> Array:
        """Returns D [E] under each of the `relabellings`."""
        n, b = self.arm.seeds, self.base.seeds
        test = np.concatenate([self.arm.test, self.base.test])
        if self.arm.candidates == 1:
            d: Array = weights(n, b) @ test[:, 0]
            return d
        validation, orders, parts = np.concatenate([self.arm.validation, self.base.validation]), relabellings(n, b), []
        for at in range(0, len(orders), AT_ONCE):
            order = orders[at : at + AT_ONCE]
            groups = order[:, :n], order[:, n:]
            one, other = (replace(self.arm, validation=validation[of], test=test[of], block=n) for of in groups)
            parts.append(one.results().mean(-1) - other.results().mean(-1))
        return np.concatenate(parts)


@cache
def relabellings(n: int, b: int) -> NDArray[np.intp]:
    """Returns the numbers of n + b runs in E orders, [E, n + b].

    An order gives its first n runs to the arm and the others to the base. The first order is 0, 1, ..., in which runs 0
    to n - 1 are those that the arm truly has.
    """
    random = np.random.default_rng(0)
    orders = np.tile(np.arange(n + b), (RELABELLINGS, 1))
    orders[1:] = random.permuted(orders[1:], axis=1)
    orders.flags.writeable = False
    return orders


@cache
def weights(n: int, b: int) -> Array:
    """Returns the weight of each run in D under each of the `relabellings`, [E, n + b]."""
    of_runs = np.empty((RELABELLINGS, n + b))
    np.put_along_axis(of_runs, relabellings(n, b), np.repeat([1 / n, -1 / b], [n, b])[None], axis=1)
    of_runs.flags.writeable = False
    return of_runs


def compare_groups(
    groups: Sequence[Groups], units: Sequence[int] | None = None, margins: Sequence[float] | None = None
) -> list[Difference]:
    """Tests all arms together.

    Args:
        groups: The runs of each arm and of its base.
        units: A number for each arm. Arms with the same number share a unit of measurement. None means that all do.
        margins: The least difference of each arm that matters; None if any difference does.

    Returns:
        The difference of each arm. It has an infinite interval if arm or base has a single seed.

    Examples:
        >>> base = [0.5, 0.6, 0.4, 0.5, 0.7, 0.5, 0.4, 0.6, 0.5, 0.6, 0.4, 0.5]
        >>> arms = [[0.9, 0.8, 0.7, 0.9, 0.8, 0.8], [0.5, 0.6, 0.4, 0.7, 0.5, 0.4]]
        >>> [(round(d.mean, 3), d.decided) for d in compare_groups([Groups.plain(arm, base) for arm in arms])]
        [(0.3, True), (0.0, False)]
    """
    units, margins = list(units or [0] * len(groups)), list(margins or [0.0] * len(groups))
    variances = [float(arm.results[0].var(ddof=1)) if arm.arm.seeds > 1 else math.nan for arm in groups]
    differences = []
    for j, (of_arm, margin) in enumerate(zip(groups, margins, strict=True)):
        others = [v for i, v in enumerate(variances) if i != j and units[i] == units[j] and math.isfinite(v)]
        differences.append(compare_one(of_arm, others, len(groups), margin))
    return differences


def compare_one(groups: Groups, others: Sequence[float], arms: int, margin: float = 0.0) -> Difference:
    """Tests an arm of several.

    Args:
        groups: The runs of the arm and of its base.
        others: The variances of the results of the other arms in the same unit.
        arms: How many arms are tested together.
        margin: The least difference that matters.
    """
    of_arm, of_base = groups.results
    n, b, mean = len(of_arm), len(of_base), float(of_arm.mean() - of_base.mean())
    if min(n, b) < 2:
        return Difference(mean, -math.inf, math.inf, 1.0, n, margin, of_base=b)
    permutation = _Permutation.of(groups)
    mean, welch = permutation.mean, _Welch.of(of_arm, of_base, others)

    def p(off: float) -> float:
        """Returns p of "the difference is the mean plus `off`"."""
        return min(1.0, arms * max(permutation.p(off), welch.p(off)))

    low, high = (max(permutation.reach(side, ALPHA / arms), welch.reach(ALPHA / arms)) for side in (-1, 1))
    is_equal = abs(mean) < margin and max(p(-margin - mean), p(margin - mean)) <= 2 * ALPHA
    return Difference(mean, mean - low, mean + high, p(-mean), n, margin, is_equal, of_base=b)


@dataclass(frozen=True)
class _Permutation:
    """The test of Fisher and Pitman.

    Attributes:
        mean: The observed D. A difference by rounding alone is 0.
        reaches: How far off the mean, below it and above it, a difference may be so that |D| of a relabelling is still
            at least the observed one, [2, E]. Infinite for the observed labels.
    """

    mean: float
    reaches: Array

    @classmethod
    def of(cls, groups: Groups) -> "_Permutation":
        n, b = groups.arm.seeds, groups.base.seeds
        of_arm = weights(n, b)[:, :n].sum(1)  # D of a shift of the arm by 1
        d = groups.relabelled()
        dust = 1e-12 * max(float(np.abs(groups.arm.test).max()), float(np.abs(groups.base.test).max()))
        d = np.where(np.abs(d) <= dust, 0.0, d)
        # If D is u off, a relabelling has |D| = |rest - u of_arm|. It is at least |u| for u from 0 up to the larger of
        # rest / (1 + of_arm) and -rest / (1 - of_arm), and down to minus the larger of the same with the other signs.
        rest = d - d[0] * of_arm
        rest = np.where(np.abs(rest) <= dust, 0.0, rest)
        with np.errstate(divide="ignore", invalid="ignore"):
            up, down = rest / (1 + of_arm), rest / (1 - of_arm)
        reaches = np.stack([np.maximum(down, -up), np.maximum(up, -down)])
        reaches[:, of_arm >= 1 - _TIED] = np.inf
        reaches = np.where(np.abs(reaches - abs(d[0])) <= _TIED * abs(d[0]), abs(d[0]), reaches)
        return cls(float(d[0]), reaches)

    def p(self, off: float) -> float:
        """Returns p_1 of "the difference is the mean plus `off`"."""
        return float((self.reaches[int(off > 0)] >= abs(off)).mean())

    def reach(self, side: int, alpha: float) -> float:
        """Returns how far off the mean, to a side, the last difference lies that is not rejected."""
        reaches = self.reaches[int(side > 0)]
        most = math.floor(alpha * len(reaches) * (1 + 1e-9))
        return float(np.partition(reaches, len(reaches) - 1 - most)[len(reaches) - 1 - most])


@dataclass(frozen=True)
class _Welch:
    """Welch's t test, whose variance of the arm the other arms steady.

    Attributes:
        error: The standard error of D.
        freedom: The degrees of freedom, by Welch and Satterthwaite.
    """

    error: float
    freedom: float

    @classmethod
    def of(cls, arm: Array, base: Array, others: Sequence[float]) -> "_Welch":
        n, own, of_base = len(arm), float(arm.var(ddof=1)), float(base.var(ddof=1)) / len(base)
        steadied = max(own, (own + float(np.median(others))) / 2) if others else own
        of_arm, freedom = steadied / n, (n - 1) * (2 if others else 1)
        squares = of_arm**2 / freedom + of_base**2 / (len(base) - 1)
        return cls(math.sqrt(of_arm + of_base), (of_arm + of_base) ** 2 / squares if squares else math.inf)

    def p(self, off: float) -> float:
        """Returns p_2 of "the difference is the mean plus `off`"."""
        from scipy.special import stdtr  # Imported here: plans need no SciPy.

        return 2 * float(stdtr(self.freedom, -abs(off) / self.error)) if self.error else float(not off)

    def reach(self, alpha: float) -> float:
        """Returns how far off the mean the last difference lies that is not rejected."""
        from scipy.special import stdtrit

        return -self.error * float(stdtrit(self.freedom, alpha / 2)) if self.error else 0.0
