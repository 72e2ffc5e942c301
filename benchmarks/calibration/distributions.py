"""Error and coverage of the joint test by the distribution of scores and the number of seeds."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from calibration.many_studies import ARMS, EFFECT, Array, Bench, covered, differences, normal
from scipy import stats

Drawn = tuple[Array, Array]
"""Scores [R, 1 + ARMS, seeds], and the true differences to the base [ARMS]."""


def shifted(scores: Array, effects: int) -> Drawn:
    """Returns scores with the first arms better by EFFECT, and the true differences."""
    truth = np.where(np.arange(ARMS) < effects, EFFECT, 0.0)
    scores[:, 1:] += truth[:, None]
    return scores, truth


def heavy(random: np.random.Generator, repeats: int, seeds: int, effects: int) -> Drawn:
    """Draws scores with heavy tails."""
    return shifted(random.standard_t(3, size=(repeats, 1 + ARMS, seeds)) / math.sqrt(3), effects)


def learned(random: np.random.Generator, repeats: int, seeds: int, effects: int) -> Drawn:
    """Draws scores near 1, of seeds that learn, or near 0.1. With an effect 95% of the seeds learn, else 60%."""
    shares = np.where(np.arange(-1, ARMS) < effects, 0.95, 0.6)
    shares[0] = 0.6
    learns = random.random((repeats, 1 + ARMS, seeds)) < shares[:, None]
    noise = abs(random.normal(size=learns.shape))
    mean = math.sqrt(2 / math.pi)
    gap = (1 - 0.02 * mean) - (0.1 + 0.03 * mean)
    return np.where(learns, 1 - 0.02 * noise, 0.1 + 0.03 * noise), (shares[1:] - shares[0]) * gap


def ties(random: np.random.Generator, repeats: int, seeds: int, effects: int) -> Drawn:
    """Draws scores of which half are exactly 1. An arm with an effect is worse, and 2% of its scores are 1."""
    ends = np.where(np.arange(-1, ARMS) < effects, -EFFECT, 0.0)
    ends[0] = 0.0
    means = ends * stats.norm.cdf(-ends) - stats.norm.pdf(ends)
    noise = random.normal(size=(repeats, 1 + ARMS, seeds))
    return 1 + 0.1 * np.minimum(0, ends[:, None] + noise), 0.1 * (means[1:] - means[0])


def correlated(random: np.random.Generator, repeats: int, seeds: int, effects: int) -> Drawn:
    """Draws scores with an effect of the seed on all, and another on all arms but not on the base."""
    scores = normal(random, repeats, seeds) + 3 * random.normal(size=(repeats, 1, seeds))
    scores[:, 1:] += random.normal(size=(repeats, 1, seeds))
    return shifted(scores, effects)


def unequal(random: np.random.Generator, repeats: int, seeds: int, effects: int) -> Drawn:
    """Draws scores of which those of one arm have 10 times the variance."""
    scores = normal(random, repeats, seeds)
    scores[:, -1] *= math.sqrt(10)
    return shifted(scores, effects)


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int, int, int], Drawn]] = {
    "normal": lambda random, repeats, seeds, effects: shifted(normal(random, repeats, seeds), effects),
    "heavy tails (t, 3 degrees)": heavy,
    "learned or not": learned,
    "ties at 1": ties,
    "correlated by seed": correlated,
    "one arm with 10 times the variance": unequal,
}


def distributions(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures error and coverage by distribution and number of seeds."""
    for name, draw in DISTRIBUTIONS.items():
        for seeds in (6, 7, 9):
            row: dict[str, Any] = {"distribution": name, "seeds": seeds}
            for effects in (0, 2):
                scores, truth = draw(bench.random, bench.repeats, seeds, effects)
                d = differences(scores)
                told, members = bench.single(d)
                row[f"error_{effects}"] = float(told[:, effects:].any(1).mean())
                row[f"coverage_{effects}"] = float(covered(d, truth, members).mean())
            yield row
