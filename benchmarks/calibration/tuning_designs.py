"""Error, coverage and power of the designs of tuning: who chooses among an arm's candidates, and by which runs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from calibration.many_studies import ARMS, EFFECT, Array, Bench, Mask, covered, differences, follow
from scipy import stats

from deltalab.statistics.joint_test import ALPHA, flips, one_look

NOISES = (0, 1, 2, 4)
"""The losses of the candidates at the ends of the range, in standard deviations of a seed's score."""


@dataclass(frozen=True)
class Design:
    """A way to choose a candidate.

    Attributes:
        title: The name of the design.
        at: The positions of the candidates in the range [-1, 1]; None draws them.
        choice: `once`, `mean`, `apart` or `own`.
        runs: The number of runs of an arm, by candidates and seeds.
        joint: Whether the arms are tested together.
        seeds: The seeds of an arm.
    """

    title: str
    at: tuple[float, ...] | None
    choice: str
    runs: Callable[[int, int], int]
    joint: bool = True
    seeds: int = 9


DESIGNS = (
    Design("one choice on one tuning seed, random candidates, separate tests", None, "once", lambda c, n: c + n, False),
    Design("one choice on one tuning seed, spread candidates", (-1, 0, 1), "once", lambda c, n: c + n),
    Design("one choice, by the mean of the seeds that count", (-1, 0, 1), "mean", lambda c, n: c * n),
    Design("each seed chooses on a tuning seed of its own", (-1, 0, 1), "apart", lambda c, n: (c + 1) * n),
    Design("each seed chooses among its own runs", (-1, 0, 1), "own", lambda c, n: c * n),
    Design("each seed chooses among its own runs, the optimum off the grid", (-1, 0.3, 1), "own", lambda c, n: c * n),
    Design("each seed chooses among its own runs, 7 seeds", (-1, 0, 1), "own", lambda c, n: c * n, seeds=7),
    Design("each seed chooses among its own runs, 6 seeds", (-1, 0, 1), "own", lambda c, n: c * n, seeds=6),
)
CANDIDATES = 3
SPLIT_NOISE = 0.2
"""The sd of a run's validation score and of its test score around the run's luck, whose sd is 1."""


def tuned(random: np.random.Generator, design: Design, noise: float, repeats: int) -> Array:
    """Draws scores [R, 1 + ARMS, seeds] of equal arms, where a candidate at u loses noise x u^2."""
    shape = (repeats, 1 + ARMS, design.seeds, CANDIDATES)
    at = random.uniform(-1, 1, size=(repeats, 1, 1, CANDIDATES)) if design.at is None else np.array(design.at)
    quality = np.broadcast_to(-noise * at**2, shape)
    runs = quality + random.normal(size=shape)
    validation, test = (runs + SPLIT_NOISE * random.normal(size=shape) for _ in range(2))
    if design.choice == "once":
        tuning = quality[:, :, :1] + random.normal(size=(repeats, 1 + ARMS, 1, CANDIDATES))
        choice = np.broadcast_to(tuning.argmax(-1), shape[:-1])
    elif design.choice == "apart":
        choice = (quality + random.normal(size=shape)).argmax(-1)
    elif design.choice == "mean":
        choice = np.broadcast_to(validation.mean(2, keepdims=True).argmax(-1), shape[:-1])
    else:
        choice = validation.argmax(-1)
    return np.take_along_axis(test, choice[..., None], axis=-1)[..., 0]


def separate_tests(d: Array) -> tuple[Mask, Mask]:
    """Computes exact sign-flip tests with Holm's correction, and t intervals with Bonferroni's.

    Returns:
        The arms that are told from the base [R, arms], and whether all intervals of a study hold 0 [R].
    """
    n, arms = d.shape[-1], d.shape[1]
    sums = np.abs(d @ flips(n).T)
    p = (sums >= sums[:, :, :1] * (1 - 1e-9)).mean(-1)
    order = np.argsort(p, axis=1)
    adjusted = np.maximum.accumulate(np.take_along_axis(p, order, 1) * np.arange(arms, 0, -1), axis=1)
    told = np.empty_like(adjusted, dtype=bool)
    np.put_along_axis(told, order, adjusted <= ALPHA, 1)
    margin = stats.t.ppf(1 - ALPHA / (2 * arms), n - 1) * d.std(-1, ddof=1) / math.sqrt(n)
    return told, (abs(d.mean(-1)) <= margin).all(1)


def designs(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures error, coverage and power of each design."""
    for design in DESIGNS:
        for noise in NOISES:
            seeds = design.seeds
            scores = tuned(bench.random, design, noise, bench.repeats)
            better = scores.copy()
            better[:, 1] += EFFECT
            if design.joint:
                told, members = bench.single(differences(scores))
                holds = covered(differences(scores), np.zeros(ARMS), members)
                told_better = follow(differences(better), one_look(seeds))[0]
            else:
                told, holds = separate_tests(differences(scores))
                told_better, _ = separate_tests(differences(better))
            yield {
                "design": design.title,
                "noise": noise,
                "runs_per_arm": design.runs(CANDIDATES, seeds),
                "error": float(told.any(1).mean()),
                "coverage": float(holds.mean()),
                "power": float(told_better[:, 0].mean()),
            }
