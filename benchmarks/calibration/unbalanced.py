"""Error and power where the base has more seeds than an arm: 6 of each of 7 arms, and 16.

Every study goes through deltalab's own statistics.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from calibration.many_studies import ARMS, EFFECT, Array, Bench
from calibration.seed_choices import told
from calibration.tuning_designs import SPLIT_NOISE

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import ALPHA, follow, one_look
from deltalab.statistics.unbalanced import Groups, compare_groups, weights

SEEDS, OF_BASE = 6, 16
IN_PAIRS = 7
"""The seeds of pairs with 56 runs; those of the other design are 58."""
CORRELATIONS = (0.0, 0.15, 0.5)
SHARE = 10
"""A study here takes about 20 ms, so that there are fewer of them by this factor."""
SHARE_TUNED = 60
"""The same for studies that tune, of two arms, which take about a second."""

Drawn = tuple[Array, Array]
"""The scores of the arms [ARMS, SEEDS] and of the base [OF_BASE]."""
Random = np.random.Generator


def correlated(random: Random, correlation: float, arms: int = ARMS, n: int = SEEDS, b: int = OF_BASE) -> Drawn:
    """Draws normal scores that correlate by seed, where arms and base share the first seeds."""
    of_seed = math.sqrt(correlation) * random.normal(size=b)
    own = math.sqrt(1 - correlation)
    return of_seed[:n] + own * random.normal(size=(arms, n)), of_seed + own * random.normal(size=b)


def scaled(of_arms: tuple[float, ...] | float, of_base: float = 1.0) -> Callable[[Random], Drawn]:
    """Draws normal scores with the standard deviations given."""

    def draw(random: Random) -> Drawn:
        arms, base = correlated(random, 0.0)
        return arms * np.reshape(of_arms, (-1, 1)), base * of_base

    return draw


def alike(draw: Callable[[Random, tuple[int, ...]], Array]) -> Callable[[Random], Drawn]:
    """Draws the scores of arms and base in one way."""
    return lambda random: (draw(random, (ARMS, SEEDS)), draw(random, (OF_BASE,)))


def learned(random: Random, shape: tuple[int, ...]) -> Array:
    """Draws scores near 1, of seeds that learn, or near 0.1."""
    noise = abs(random.normal(size=shape))
    return np.where(random.random(shape) < 0.6, 1 - 0.02 * noise, 0.1 + 0.03 * noise)


def two_collapse(random: Random) -> Drawn:
    """Draws scores where the last two arms lose by far with a fifth of their seeds; they truly differ."""
    arms, base = correlated(random, 0.0)
    arms[-2:] -= 20 * (random.random((2, SEEDS)) < 0.2)
    return arms, base


def skewed_arms(random: Random) -> Drawn:
    """Draws exponential scores of the arms and normal ones of the base, with equal means and variances."""
    arms, base = correlated(random, 0.0)
    return random.exponential(size=arms.shape) - 1, base


def skewed_base(random: Random) -> Drawn:
    """Draws exponential scores of the base and normal ones of the arms, with equal means and variances."""
    arms, base = correlated(random, 0.0)
    return arms, random.exponential(size=base.shape) - 1


DISTRIBUTIONS: dict[str, Callable[[Random], Drawn]] = {
    **{f"normal, correlation {r:g}": lambda random, r=r: correlated(random, r) for r in CORRELATIONS},  # type: ignore[misc]
    "heavy tails (t, 3 degrees)": alike(lambda random, shape: random.standard_t(3, size=shape)),
    "exponential": alike(lambda random, shape: random.exponential(size=shape)),
    "learned or not": alike(learned),
    "ties at the best score": alike(lambda random, shape: np.minimum(0, random.normal(size=shape))),
    "base with a third of the sd": scaled(1.0, 1 / 3),
    "base with a tenth of the sd": scaled(1.0, 0.1),
    "base with 3 times the sd": scaled(1.0, 3.0),
    "base with equal scores": scaled(1.0, 0.0),
    "one arm with 3 times the sd": scaled((1, 1, 1, 1, 1, 1, 3)),
    "one arm with 10 times the sd": scaled((1, 1, 1, 1, 1, 1, 10)),
    "four arms with 3 times the sd": scaled((1, 1, 1, 3, 3, 3, 3)),
    "two arms collapse on a fifth of the seeds": two_collapse,
    "skewed arms": skewed_arms,
    "skewed base": skewed_base,
}


def unbalanced_error(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the share of studies that tell an arm whose mean is the base's, here and by relabelling alone."""
    studies = max(1, bench.repeats // SHARE)
    for name, draw in DISTRIBUTIONS.items():
        error = alone = contradictions = 0
        for _ in range(studies):
            arms, base = draw(bench.random)
            equal = ARMS - 2 if draw is two_collapse else ARMS
            found = compare_groups([Groups.plain(arm, base) for arm in arms])
            error += any(difference.p <= ALPHA for difference in found[:equal])
            contradictions += sum(difference.decided != (difference.p <= ALPHA) for difference in found)
            d = np.abs(weights(SEEDS, OF_BASE) @ np.hstack([arms, np.tile(base, (ARMS, 1))]).T)
            p = (d >= d[0] * (1 - 1e-9)).mean(0)
            alone += bool((p[:equal] <= ALPHA / ARMS).any())
        yield {
            "scores": name,
            "studies": studies,
            "error": error / studies,
            "relabelling_alone": alone / studies,
            "contradictions": contradictions,
        }


def unbalanced_tuned(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the same of two arms whose seeds weigh three candidates, of which two lose what is given.

    Where noise differs and candidates do, a noisier arm chooses worse: its mean truly differs.
    """
    studies = max(1, bench.repeats // SHARE_TUNED)
    for name, sd, loss in (("alike", 1.0, 1.0), ("base with a third of the sd", 1 / 3, 0.0)):
        error = 0
        for _ in range(studies):
            sizes = ((OF_BASE, sd), (SEEDS, 1.0), (SEEDS, 1.0))
            base, *arms = (_tuned(bench.random, n, noise, loss) for n, noise in sizes)
            error += any(difference.p <= ALPHA for difference in compare_groups([Groups(arm, base) for arm in arms]))
        yield {"scores": name, "loss": loss, "studies": studies, "error": error / studies}


def _tuned(random: Random, seeds: int, sd: float, loss: float) -> Sample:
    luck = sd * random.normal(size=(seeds, 3)) - loss * np.array([1.0, 0.0, 1.0])
    validation, test = (luck + sd * SPLIT_NOISE * random.normal(size=luck.shape) for _ in range(2))
    return Sample(validation, test)


def unbalanced_power(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the power for one arm off by 2 sd of a seed's score, beside pairs with about as many runs."""
    studies = max(1, bench.repeats // SHARE)
    for correlation in CORRELATIONS:
        found = {"unbalanced": 0, "pairs": 0}
        for _ in range(studies):
            arms, base = correlated(bench.random, correlation)
            arms[0] += EFFECT
            found["unbalanced"] += compare_groups([Groups.plain(arm, base) for arm in arms])[0].decided
            arms, base = correlated(bench.random, correlation, n=IN_PAIRS, b=IN_PAIRS)
            arms[0] += EFFECT
            found["pairs"] += told(follow(list(arms - base), one_look(IN_PAIRS), intervals=False)[0])
        yield {
            "correlation": correlation,
            "studies": studies,
            "runs_unbalanced": ARMS * SEEDS + OF_BASE,
            "runs_pairs": (1 + ARMS) * IN_PAIRS,
            **{name: count / studies for name, count in found.items()},
        }
