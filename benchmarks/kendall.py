"""Kendall's tau between the true orders of arms, from the scores of a few seeds.

The noise of seeds swaps arms whose true means are close, so that tau between measured means lies nearer to 0 than tau
between true means. `true_tau` undoes this by simulation. For each tau t it takes true means whose order has tau t and
that differ least from the measured means, adds the noise of the seeds, and sees how often tau between the results is
below the measured tau. The estimate is the t where this happens in half of the simulations. The 95% interval holds the
t where it happens in 2.5 to 97.5% of them.

The spread of the true means is uncertain, too. Measured means spread more than true ones, by the noise of a mean, so
each simulation draws anew how far the spread shrinks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltalab.statistics.intervals import DRAWS, LEVEL, student_draws

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TrueTau:
    """Kendall's tau between the true orders.

    Attributes:
        tau: The median-unbiased estimate; NaN if all arms score the same on one side, which has no order then.
        low: The lower end of the 95% interval.
        high: The upper end of the interval.
    """

    tau: float
    low: float
    high: float


def tau(x: Array, y: Array) -> Array:
    """Kendall's tau-b of each pair of rows [.., n] and [.., n]; 0 if all numbers of a row are equal.

    >>> tau(np.array([1.0, 2.0, 3.0]), np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])).tolist()
    [1.0, -1.0, 0.0]
    """
    above = np.triu_indices(x.shape[-1], 1)
    of_x, of_y = (np.sign(scores[..., above[0]] - scores[..., above[1]]) for scores in (x, y))
    size = np.sqrt((of_x != 0).sum(-1) * (of_y != 0).sum(-1))
    taus: Array = np.divide((of_x * of_y).sum(-1), size, out=np.zeros(np.shape(size)), where=size > 0)
    return taus


def true_tau(x: Array, y: Array) -> TrueTau:
    """Estimates Kendall's tau between the true means of arms.

    Args:
        x: The scores of the arms on one task [arms, seeds], with at least two seeds.
        y: The scores of the same arms on another task [arms, seeds], with other noise.
    """
    if any((scores.mean(1) == scores.mean()).all() for scores in (x, y)):
        return TrueTau(np.nan, -1.0, 1.0)
    sides = [_Side.of(scores, seed) for seed, scores in enumerate((x, y))]
    measured = tau(*(side.mean for side in sides))

    def below(truth: list[Array]) -> float:
        """The share of simulations with less than the measured tau; equal ones count half."""
        simulated = tau(*(side.simulated(means) for side, means in zip(sides, truth, strict=True)))
        difference = simulated - measured
        return float(((difference < -1e-9).mean() + (difference <= 1e-9).mean()) / 2)

    tail = (1 - LEVEL) / 2
    start = [side.mean for side in sides]
    curve = [(float(measured), below(start))]
    for direction in (-1, 1):
        for truth in _truths(sides, direction):
            curve.append((float(tau(*truth)), below(truth)))
            if not tail <= curve[-1][1] <= 1 - tail:
                break
    taus, shares = np.array(sorted(curve)).T
    shares = np.minimum.accumulate(shares)
    held = taus[(shares >= tail) & (shares <= 1 - tail)]
    estimate = float(np.interp(-0.5, -shares, taus))
    return TrueTau(estimate, min([estimate, *held]), max([estimate, *held]))


@dataclass(frozen=True)
class _Side:
    """The arms on one task.

    Attributes:
        mean: The measured means [arms].
        variance: The variance of a seed's score [arms].
        spread: How far the spread of the true means shrinks in each simulation [DRAWS, 1].
        noise: The noise of the means in each simulation [DRAWS, arms].
    """

    mean: Array
    variance: Array
    spread: Array
    noise: Array

    @classmethod
    def of(cls, scores: Array, seed: int) -> "_Side":
        arms, seeds = scores.shape
        draws = student_draws(scores, seed)
        # What all arms have in common on a seed moves no arm past another.
        residuals = scores - draws[0][:, None]
        residuals = residuals - residuals.mean(0)
        noise = float((residuals**2).sum()) / ((arms - 1) * (seeds - 1) * seeds)
        chi2 = np.random.default_rng(seed + 2).chisquare(arms - 1, size=(DRAWS, 1))
        spread = np.sqrt(np.maximum((arms - 1) / chi2 - noise / draws[0].var(ddof=1), 0.0))
        variance = np.maximum(scores.var(1, ddof=1), np.finfo(float).tiny)
        return cls(draws[0], variance, spread, draws[1:] - draws[0])

    def simulated(self, truth: Array) -> Array:
        """Measured means [DRAWS, arms] of arms whose true means are a rearrangement of the measured ones."""
        means: Array = self.spread * (truth - self.mean.mean()) + self.noise
        return means

    def swap(self, truth: Array, other: Array, direction: int) -> tuple[float, Array]:
        """The cheapest swap of neighbours that moves tau in a direction: its cost, and the true means after it.

        The cost is the growth of the squared distance to the measured means, in variances of a seed's score.
        """
        order = np.argsort(truth, kind="stable")
        i, j = order[:-1], order[1:]
        cost = ((truth[j] - self.mean[i]) ** 2 - (truth[i] - self.mean[i]) ** 2) / self.variance[i]
        cost += ((truth[i] - self.mean[j]) ** 2 - (truth[j] - self.mean[j]) ** 2) / self.variance[j]
        cost = np.where((truth[j] > truth[i]) & (direction * (other[j] - other[i]) < 0), cost, np.inf)
        best = int(cost.argmin())
        swapped = truth.copy()
        swapped[[i[best], j[best]]] = truth[[j[best], i[best]]]
        return float(cost[best]), swapped


def _truths(sides: list[_Side], direction: int) -> Iterator[list[Array]]:
    """True means whose tau goes up (1) or down (-1) by one pair of arms at a time, by the cheapest swaps."""
    x, y = sides
    truth = [x.mean, y.mean]
    while True:
        (cost_x, of_x), (cost_y, of_y) = x.swap(truth[0], truth[1], direction), y.swap(truth[1], truth[0], direction)
        if not np.isfinite(min(cost_x, cost_y)):
            return
        truth = [of_x, truth[1]] if cost_x <= cost_y else [truth[0], of_y]
        yield truth
