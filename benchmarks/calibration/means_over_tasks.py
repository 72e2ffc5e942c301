"""Error, coverage and power of the means over tasks.

Every study goes through `deltalab.statistics.over_tasks`. Scores are normalized: chance is 0, perfect is 1.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from calibration.many_studies import ARMS, Array, Bench
from scipy import stats

from deltalab.statistics.interquartile import interquartile_parts
from deltalab.statistics.intervals import mean_interval
from deltalab.statistics.joint_test import ALPHA, Difference, one_look
from deltalab.statistics.over_tasks import OverTasks
from deltalab.statistics.seed_choice import Run, Scores, outcomes

DESIGNS = ((2, 6), (3, 7), (6, 7))
"""Tasks and seeds."""
LEVELS = {2: (0.6, 0.85), 3: (0.3, 0.6, 0.85), 6: (0.1, 0.3, 0.5, 0.6, 0.8, 0.9)}
"""The base's mean on each task, by the number of tasks."""
ALL, ONE = 1.2, 2.5
"""The effects on an arm that differs on every task, and on one that differs on one task, in sd of a seed's score."""
RESAMPLES = 400
"""The resamples of the bootstrap."""
MANY = 100_000
"""The seeds that give the true values."""


def shifted(sd: float | Array, random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    """Draws scores of every arm on every task [1 + ARMS, K, n, 1] that an effect shifts."""
    scores: Array = level + sd * (effects[..., None] + random.normal(size=(*effects.shape, n)))
    return scores[..., None]


def normal(random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    return shifted(0.1, random, level, effects, n)


def unequal(random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    """Draws scores that vary 15 times as much on the last task as on the first."""
    return shifted(np.geomspace(0.02, 0.3, len(level))[:, None], random, level, effects, n)


def correlated(random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    """Draws scores of which half of the variance is of the arm's seed on all tasks, and a part of the task's seed."""
    of_seed = random.normal(size=(len(effects), 1, n)) + random.normal(size=(1, len(level), n))
    scores = level + 0.1 * effects[..., None]
    return (scores + 0.1 * math.sqrt(0.5) * (of_seed + random.normal(size=(*effects.shape, n))))[..., None]


def ceiling(random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    """Draws scores of which up to a third are exactly 1."""
    return np.minimum(1.0, shifted(0.2, random, level, effects, n))


def learned(random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    """Draws scores near 1, of seeds that learn, or near 0.1. The level of a task is the share that learns."""
    learns = random.normal(size=(*effects.shape, n)) < stats.norm.ppf(level) + effects[..., None]
    noise = abs(random.normal(size=learns.shape))
    return np.where(learns, 1 - 0.02 * noise, 0.1 + 0.03 * noise)[..., None]


def tuned(random: np.random.Generator, level: Array, effects: Array, n: int) -> Array:
    """Draws scores of three candidates, of which one loses an sd."""
    luck = random.normal(size=(*effects.shape, n, 3))
    return level[..., None] + 0.1 * (effects[..., None, None] + luck - np.array([0.0, 0.0, 1.0]))


KINDS: dict[str, Callable[[np.random.Generator, Array, Array, int], Array]] = {
    "normal": normal,
    "sd from 0.02 to 0.3 by task": unequal,
    "correlated over tasks and arms": correlated,
    "ties at 1": ceiling,
    "learned or not": learned,
    "three candidates": tuned,
}


def drawn(random: np.random.Generator, kind: str, effects: Array, n: int) -> Array:
    """Draws test scores [1 + ARMS, K, n, C] with effects [1 + ARMS, K], in sd of a seed's score."""
    return KINDS[kind](random, np.array(LEVELS[effects.shape[1]])[:, None], effects, n)


def over_tasks(scores: Array, random: np.random.Generator) -> OverTasks:
    """A study with these test scores; validation scores differ a little from them."""
    validation = scores + 0.02 * random.normal(size=scores.shape)
    arms, tasks, n, candidates = scores.shape
    names = ["base", *map(str, range(1, arms))]
    by_task = [
        Scores(
            "base",
            True,
            0.0,
            {
                name: {
                    c: {s + 1: Run(float(validation[j, k, s, c]), float(scores[j, k, s, c])) for s in range(n)}
                    for c in range(candidates)
                }
                for j, name in enumerate(names)
            },
            dict.fromkeys(names, range(1, n + 1)),
        )
        for k in range(tasks)
    ]
    return OverTasks(by_task, [1.0] * tasks, n)


def told(difference: Difference) -> bool:
    return difference.p <= ALPHA


def cells(bench: Bench) -> Iterator[tuple[dict[str, Any], np.random.Generator]]:
    """Yields each kind of scores with each design, and a source of random numbers of its own."""
    kinds = [
        {"scores": kind, "tasks": tasks, "seeds": seeds} for kind, (tasks, seeds) in itertools.product(KINDS, DESIGNS)
    ]
    yield from zip(kinds, bench.random.spawn(len(kinds)), strict=True)


def over_tasks_error(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures how often an arm has a verdict over tasks though all arms are alike."""
    studies = max(1, bench.repeats // 3)
    for cell, random in cells(bench):
        yield {**cell, "studies": studies, **error_of(random, studies, **cell)}


def error_of(random: np.random.Generator, studies: int, scores: str, tasks: int, seeds: int) -> dict[str, float]:
    wrong = np.zeros(3)
    for _ in range(studies):
        study = over_tasks(drawn(random, scores, np.zeros((1 + ARMS, tasks)), seeds), random)
        found = study.differences(intervals=False).values()
        mean, of_iqm = any(told(mean) for mean, _ in found), any(told(of_iqm) for _, of_iqm in found)
        wrong += (mean, of_iqm, mean or of_iqm)
    return dict(zip(("mean", "iqm", "either"), (wrong / studies).tolist(), strict=True))


def two_effects(tasks: int) -> Array:
    """The effects [1 + ARMS, K] of an arm that is better on every task, and of one that is worse on the last."""
    effects = np.zeros((1 + ARMS, tasks))
    effects[1], effects[2, -1] = ALL, -ONE
    return effects


def iqm(x: Array) -> Array:
    """The interquartile means of rows [..., N]."""
    cut = x.shape[-1] // 4
    middle: Array = np.sort(x)[..., cut : x.shape[-1] - cut].mean(-1)
    return middle


def over_tasks_coverage(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures how often intervals hold the truth where two arms differ: all together, and for the base's IQM alone.

    The bootstrap draws seeds anew on each task, 95% percentiles, for each arm alone (Agarwal et al. 2021).
    """
    studies = max(1, bench.repeats // 12)
    for cell, random in cells(bench):
        if (
            cell["scores"] != "three candidates"
        ):  # The true result of weighed candidates depends on the number of seeds.
            yield {**cell, "studies": studies, **coverage_of(random, studies, **cell)}


def coverage_of(random: np.random.Generator, studies: int, scores: str, tasks: int, seeds: int) -> dict[str, float]:
    effects, held = two_effects(tasks), np.zeros(5)
    truth = drawn(random, scores, effects, MANY)[..., 0]
    means, iqms = truth.mean((1, 2)), iqm(truth.reshape(1 + ARMS, -1))
    by_mean, by_iqm = means[1:] - means[0], iqms[1:] - iqms[0]
    for _ in range(studies):
        x = drawn(random, scores, effects, seeds)
        found = over_tasks(x, random).differences().values()
        base = mean_interval(interquartile_parts(x[0, ..., 0].T))
        low, high = bootstrapped(random, x[..., 0])
        held += (
            all(d.low <= t <= d.high for (d, _), t in zip(found, by_mean, strict=True)),
            all(d.low <= t <= d.high for (_, d), t in zip(found, by_iqm, strict=True)),
            ((low[1:] <= by_iqm) & (by_iqm <= high[1:])).mean(),
            base.low <= iqms[0] <= base.high,
            low[0] <= iqms[0] <= high[0],
        )
    names = ("mean", "iqm", "iqm_bootstrap", "iqm_of_base", "iqm_of_base_bootstrap")
    return dict(zip(names, (held / studies).tolist(), strict=True))


def bootstrapped(random: np.random.Generator, scores: Array) -> tuple[Array, Array]:
    """The percentile intervals of the base's IQM and of each arm's minus the base's, [1 + ARMS], for scores [., K, n].

    Seeds are drawn for each arm and task apart, as rliable does.
    """
    n = scores.shape[-1]
    drawn = random.integers(n, size=(RESAMPLES, *scores.shape))
    resampled = np.take_along_axis(np.broadcast_to(scores, drawn.shape), drawn, -1)
    found = iqm(resampled.reshape(*drawn.shape[:2], -1))
    found[:, 1:] -= found[:, :1]
    low, high = np.quantile(found, (0.025, 0.975), axis=0)
    return low, high


def over_tasks_power(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures how often the two arms that differ are told from the base, over tasks and on single tasks."""
    studies = max(1, bench.repeats // 20)
    for cell, random in cells(bench):
        yield {**cell, "studies": studies, **power_of(random, studies, **cell)}


def power_of(random: np.random.Generator, studies: int, scores: str, tasks: int, seeds: int) -> dict[str, float]:
    found = dict.fromkeys(("all_mean", "all_iqm", "all_some_task", "one_mean", "one_iqm", "one_some_task"), 0.0)
    for _ in range(studies):
        study = over_tasks(drawn(random, scores, two_effects(tasks), seeds), random)
        over = study.differences(intervals=False)
        single = outcomes(study.scores, one_look(seeds), intervals=False)
        for name, arm in (("all", "1"), ("one", "2")):
            mean, of_iqm = over[arm]
            found[f"{name}_mean"] += told(mean) / studies
            found[f"{name}_iqm"] += told(of_iqm) / studies
            found[f"{name}_some_task"] += any(told(task[arm].difference) for task in single) / studies
    return found
