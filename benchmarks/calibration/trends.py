"""Coverage of the predictions of a ladder, and bias and coverage of Kendall's tau between tasks."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from calibration.many_studies import Array, Bench
from kendall import tau, true_tau

from deltalab.study.answers.ladder_trends import fit, fit_with_intervals, predict

RESAMPLES = 400
"""The resamples of the bootstraps that were used before."""


# Predictions of a ladder.

LADDER_SEEDS = (4, 6, 9, 15)
NOISES: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Array]] = {
    "normal": lambda random, shape: random.normal(size=shape),
    "heavy tails (t, 3 degrees)": lambda random, shape: random.standard_t(3, size=shape) / math.sqrt(3),
}


@dataclass(frozen=True)
class Law:
    """The losses of an arm and of the base, which is much like it.

    Attributes:
        compute: The compute at each size [sizes].
        means: The true losses [2, sizes].
        arm: a, b and c of the arm.
        sd: The standard deviation of a seed's loss.
    """

    compute: Array
    means: Array
    arm: Array
    sd: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> "Law":
        """Draws 4 to 6 sizes, and a law and a noise of a realistic range."""
        compute = 4.0 ** np.arange(random.integers(4, 7))
        base = np.array([random.uniform(1.5, 3), *np.exp(random.uniform(np.log([0.05, 0.05]), np.log([5.0, 1.5])))])
        arm = base * np.exp(random.normal(size=3) * [0.02, 0.2, 0.2])
        means = np.stack([a + b * compute**-c for a, b, c in (arm, base)])
        return cls(compute, means, arm, float(np.exp(random.uniform(math.log(0.005), math.log(0.05)))))

    def losses(self, random: np.random.Generator, noise: str, *shape: int) -> Array:
        """Draws losses [*shape, 2, sizes]. Arm and base correlate by 0.5 on a seed."""
        of_seed, own = (NOISES[noise](random, (*shape, members, len(self.compute))) for members in (1, 2))
        losses: Array = self.means + self.sd * math.sqrt(0.5) * (of_seed + own)
        return losses

    def misses(self, losses: Array) -> Array:
        """The middle 95% of predicted minus measured difference at the largest size, for means [R, 2, sizes]."""
        a, b, c = fit(self.compute[:-1], losses[..., :-1])
        miss = a + b * self.compute[-1] ** -c - losses[..., -1]
        middle: Array = np.quantile(miss[:, 0] - miss[:, 1], (0.025, 0.975))
        return middle


def extrapolation(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures how often the intervals of a ladder hold the truth, where each arm follows its law."""
    for noise in NOISES:
        for seeds in LADDER_SEEDS:
            studies = [_extrapolated(bench.random, noise, seeds) for _ in range(max(1, bench.repeats // 15))]
            shares = {name: float(np.mean([held[name] for held, _ in studies])) for name in studies[0][0]}
            before, now = np.median([widths for _, widths in studies], axis=0)
            yield {"noise": noise, "seeds": seeds, **shares, "bootstrap_width": float(before), "width": float(now)}


def _extrapolated(random: np.random.Generator, noise: str, seeds: int) -> tuple[dict[str, bool], tuple[float, float]]:
    """Which intervals of a study hold the truth, and the widths of those of the miss, before and now.

    Widths are over the middle 95% of the misses of other studies of the same law.
    """
    law = Law.drawn(random)
    losses = law.losses(random, noise, seeds)
    labels = [f"{compute:g}" for compute in law.compute]
    (found,) = predict(labels, [law.compute] * 2, losses.transpose(1, 2, 0), 1)
    arm = fit_with_intervals(law.compute[:-1], losses[:, 0, :-1].T)
    low, high = law.misses(losses[random.integers(seeds, size=(RESAMPLES, seeds))].mean(1))
    sampled = law.misses(law.losses(random, noise, RESAMPLES, seeds).mean(1))
    difference = law.means[0, -1] - law.means[1, -1]
    held = {
        "bootstrap": bool(low <= 0 <= high),
        "agrees": found.agrees,
        "predicted": bool(found.predicted.low <= difference <= found.predicted.high),
        "measured": bool(found.measured.low <= difference <= found.measured.high),
        **{name: bool(arm.low[i] <= law.arm[i] <= arm.high[i]) for i, name in enumerate("abc")},
    }
    spread = sampled[1] - sampled[0]
    return held, ((high - low) / spread, (found.miss.high - found.miss.low) / spread)


# Kendall's tau between a proxy and its target.

TAU_ARMS = 9
DISCORDANT = (0, 4, 9, 18)
"""The pairs of arms, of 36, that the target orders the other way."""
APART = (0.5, 1.0, 2.0)
"""The sd of the arms' true means, in standard deviations of a seed's score."""
TAU_SEEDS = (4, 6, 9)


def true_means(random: np.random.Generator, apart: float, discordant: int) -> tuple[Array, Array]:
    """Draws true means of the arms on two tasks, whose orders differ in exactly the given number of pairs."""
    x, y = np.sort(apart * random.normal(size=(2, TAU_ARMS)), axis=1)
    order, count = np.arange(TAU_ARMS), 0
    while count < discordant:
        i = random.integers(TAU_ARMS - 1)
        if order[i] < order[i + 1]:
            order[[i, i + 1]] = order[[i + 1, i]]
            count += 1
    return x, y[order]


def bootstrapped(random: np.random.Generator, x: Array, y: Array) -> tuple[float, float, float]:
    """Tau of the means, and its percentile bootstrap over seeds."""
    means = (s[:, random.integers(s.shape[1], size=(RESAMPLES, s.shape[1]))].mean(-1).T for s in (x, y))
    low, high = np.quantile(tau(*means), (0.025, 0.975))
    return float(tau(x.mean(1), y.mean(1))), float(low), float(high)


def transfer_tau(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures bias and coverage of Kendall's tau between the means of seeds, by bootstrap and by `true_tau`."""
    for discordant in DISCORDANT:
        truth = 1 - 4 * discordant / (TAU_ARMS * (TAU_ARMS - 1))
        for apart in APART:
            for seeds in TAU_SEEDS:
                found = []
                for _ in range(max(1, bench.repeats // 40)):
                    means = true_means(bench.random, apart, discordant)
                    x, y = (of_task[:, None] + bench.random.normal(size=(TAU_ARMS, seeds)) for of_task in means)
                    now = true_tau(x, y)
                    found.append((bootstrapped(bench.random, x, y), (now.tau, now.low, now.high)))
                estimate, low, high = np.moveaxis(np.array(found), -1, 0)
                row: dict[str, Any] = {"tau": truth, "apart": apart, "seeds": seeds}
                for i, when in enumerate(("bootstrap_", "")):
                    holds = (low[:, i] <= truth + 1e-9) & (high[:, i] >= truth - 1e-9)
                    row[f"{when}bias"] = float((estimate[:, i] - truth).mean())
                    row[f"{when}coverage"] = float(holds.mean())
                    row[f"{when}width"] = float(np.median(high[:, i] - low[:, i]))
                yield row
