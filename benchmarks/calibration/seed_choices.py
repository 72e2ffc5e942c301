"""Error and power by the way in which seeds choose, with candidates that failed, and over families of tasks.

Every study goes through deltalab's own statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from calibration.many_studies import ARMS, EFFECT, Array, Bench
from calibration.tuning_designs import SPLIT_NOISE

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import ALPHA, Outcome, follow, one_look
from deltalab.statistics.pairs import Pairs
from deltalab.statistics.seed_choice import Run, Scores, outcomes

SEEDS = 7
SHARE = 6
"""A study here takes about 15 ms, so that there are fewer of them by this factor."""
RATES, TOO_HIGH, WORST = (3.0, 1.0, 0.1, 0.0, 0.0), 0.8, -500.0
"""What each learning rate loses, how often runs of the last diverge, and the score of a run that does."""
MUCH_WORSE = -6.0
"""By how many of its own standard deviations an arm is worse that every study should tell."""


def drawn(random: np.random.Generator, losses: Sequence[float], spread: Array) -> tuple[Array, Array]:
    """Draws validation and test scores [1 + ARMS, SEEDS, C] of arms whose candidates lose what is given."""
    shape = (len(spread), SEEDS, len(losses))
    luck = random.normal(size=shape)
    validation, test = (luck + SPLIT_NOISE * random.normal(size=shape) for _ in range(2))
    sd = spread[:, None, None]
    return sd * validation - losses, sd * test - losses


def own(sample: Sample) -> Array:
    """The results of seeds that take their own best run, as studies did until 2026-11-25."""
    best = sample.validation.argmax(-1)[:, None]
    return np.take_along_axis(sample.test, best, -1)[:, 0]


def by_own_choice(samples: Sequence[Sample]) -> list[Outcome]:
    """Flips the differences of seeds that choose among their own runs."""
    return follow([own(arm) - own(samples[0]) for arm in samples[1:]], one_look(SEEDS), intervals=False)


def by_flips(samples: Sequence[Sample]) -> list[Outcome]:
    """Flips the differences of seeds whose runs other seeds weigh, as if they were independent."""
    results = [sample.results() for sample in samples]
    return follow([arm - results[0] for arm in results[1:]], one_look(SEEDS), intervals=False)


def by_exchange(samples: Sequence[Sample]) -> list[Outcome]:
    """Exchanges all runs of a seed, and weighs anew: what studies do."""
    return follow([Pairs(arm, samples[0]) for arm in samples[1:]], one_look(SEEDS), intervals=False)


WAYS: dict[str, Callable[[Sequence[Sample]], list[Outcome]]] = {
    "its own best run; flips of differences": by_own_choice,
    "its runs, weighed by the other seeds; flips of differences": by_flips,
    "its runs, weighed by the other seeds; exchange of whole seeds": by_exchange,
}


def told(outcome: Outcome) -> bool:
    return outcome.difference.p <= ALPHA


def choices(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the errors of each way to choose: with equal arms, a noisy arm, and arms that are all noisy."""
    studies = max(1, bench.repeats // SHARE)
    spreads = {
        "equal": np.ones(1 + ARMS),
        "noisy": np.r_[np.ones(ARMS), 2.0],
        "all_noisy": np.r_[1.0, np.full(ARMS, 2.0)],
    }
    for candidates in (3, 6):
        for noise in (0, 1, 2, 4):
            losses = noise * (np.linspace(-1, 1, candidates) - 0.15) ** 2
            counts: dict[str, dict[str, int]] = {way: dict.fromkeys((*spreads, "better", "power"), 0) for way in WAYS}
            for _ in range(studies):
                for name, spread in spreads.items():
                    validation, test = drawn(bench.random, losses, spread)
                    samples = [Sample(v, t) for v, t in zip(validation, test, strict=True)]
                    for way, of in WAYS.items():
                        found = of(samples)
                        counts[way][name] += any(map(told, found))
                        if name == "noisy":
                            counts[way]["better"] += told(found[-1]) and found[-1].difference.mean > 0
                        if name == "equal":
                            counts[way]["power"] += told(of([samples[0], samples[1].shifted(EFFECT), *samples[2:]])[0])
            for way, of_way in counts.items():
                shares = {key: count / studies for key, count in of_way.items()}
                yield {"choice": way, "candidates": candidates, "noise": noise, "studies": studies, **shares}


def failures(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures false verdicts where the last of three candidates failed in the base, or in one arm."""
    studies = max(1, bench.repeats // SHARE)
    for who in ("base", "arm"):
        for loss in (0.0, 0.5, 1.0):
            wrong = {"before": 0, "now": 0}
            for _ in range(studies):
                validation, test = drawn(bench.random, [loss, loss, 0.0], np.ones(1 + ARMS))
                hit = 0 if who == "base" else ARMS
                samples = [Sample(v, t) for v, t in zip(validation, test, strict=True)]
                results = [own(sample.among([0, 1]) if i == hit else sample) for i, sample in enumerate(samples)]
                before = follow([arm - results[0] for arm in results[1:]], one_look(SEEDS), intervals=False)
                names = ["base", *map(str, range(1, 1 + ARMS))]
                runs = {
                    name: {
                        c: {seed + 1: Run(validation[i, seed, c], test[i, seed, c]) for seed in range(SEEDS)}
                        for c in range(2 if i == hit else 3)
                    }
                    for i, name in enumerate(names)
                }
                seeds = dict.fromkeys(names, range(1, 1 + SEEDS))
                scores = Scores("base", True, -10.0, runs, seeds, {names[hit]: {2}})
                now = outcomes([scores], one_look(SEEDS), intervals=False)[0].values()
                wrong["before"] += any(map(told, before))
                wrong["now"] += any(map(told, now))
            yield {"failed": who, "loss": loss, **{key: count / studies for key, count in wrong.items()}}


def collapsed(random: np.random.Generator, diverges: str) -> list[Sample]:
    """Draws arms whose highest rate is too high, where most runs diverge. Runs of the last arm may diverge at any."""
    validation, test = drawn(random, RATES, np.ones(1 + ARMS))
    gone = random.random(validation.shape) < [0.0, 0.0, 0.0, 0.0, TOO_HIGH]
    if diverges != "no arm":
        gone[-1] = True
    if diverges == "an arm, but for one run":
        gone[-1, -1, 0] = False
    return [Sample(*scores) for scores in zip(*(np.where(gone, WORST, of) for of in (validation, test)), strict=True)]


def collapses(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures error, coverage, power and width of the other arms where an arm's runs diverge."""
    studies = max(1, bench.repeats // SHARE)
    for diverges in ("no arm", "an arm", "an arm, but for one run"):
        error = holds = found = 0
        widths = []
        for _ in range(studies):
            samples = collapsed(bench.random, diverges)
            differences = [it.difference for it in follow([Pairs(a, samples[0]) for a in samples[1:]], one_look(SEEDS))]
            equal = differences[: ARMS if diverges == "no arm" else ARMS - 1]
            error += any(of.p <= ALPHA for of in equal)
            holds += all(of.low <= 0 <= of.high for of in equal)
            widths.append(np.mean([of.high - of.low for of in equal]) / 2)
            found += told(by_exchange([samples[0], samples[1].shifted(EFFECT), *samples[2:]])[0])
        shares = {"error": error / studies, "coverage": holds / studies, "power": found / studies}
        yield {"diverges": diverges, "studies": studies, **shares, "half_width": float(np.mean(widths))}


def with_a_worse_arm(random: np.random.Generator, sd: float, rates: Sequence[float]) -> list[Sample]:
    """Draws arms whose last one is much worse, as noisy as given, and loses what is given at each learning rate."""
    of_all = drawn(random, RATES, np.ones(1 + ARMS))
    of_worse = drawn(random, rates, np.array([sd]))
    samples = [Sample(*scores) for scores in zip(*of_all, strict=True)]
    return [*samples[:-1], Sample(of_worse[0][0], of_worse[1][0]).shifted(MUCH_WORSE * sd)]


def decided(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures whether the interval of a much worse arm holds, alone and jointly with those of the others.

    The true difference is the mean of simulated ones: a noisier arm gains more by its choice.
    """
    studies = max(1, bench.repeats // SHARE)
    for sd, rates in ((1.0, RATES), (2.0, RATES), (4.0, RATES), (1.0, RATES[::-1])):
        drawn_results = [
            [sample.results().mean() for sample in (samples[0], samples[-1])]
            for samples in (with_a_worse_arm(bench.random, sd, rates) for _ in range(10 * studies))
        ]
        true = float(np.subtract(*np.mean(drawn_results, axis=0)[::-1]))
        told_worse = alone = jointly = error = 0
        for _ in range(studies):
            samples = with_a_worse_arm(bench.random, sd, rates)
            differences = [it.difference for it in follow([Pairs(a, samples[0]) for a in samples[1:]], one_look(SEEDS))]
            *equal, worse = differences
            others_hold, holds = all(of.low <= 0 <= of.high for of in equal), worse.low <= true <= worse.high
            told_worse += worse.p <= ALPHA
            alone += holds
            jointly += holds and others_hold
            error += any(of.p <= ALPHA for of in equal)
        counts = {"decided": told_worse, "covers": alone, "all_cover": jointly, "error": error}
        shares = {name: count / studies for name, count in counts.items()}
        yield {"sd": sd, "best_rate": int(np.argmin(rates)), "studies": studies, "true": true, **shares}


def families(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the error of a study of several tasks, where each task or the whole study is a family."""
    studies = max(1, bench.repeats // SHARE)
    for tasks in (1, 3, 8):
        wrong = {"task": 0, "study": 0}
        for _ in range(studies):
            scores = bench.random.normal(size=(tasks, 1 + ARMS, SEEDS))
            by_task = [list(task[1:] - task[0]) for task in scores]
            wrong["task"] += any(told(o) for d in by_task for o in follow(d, one_look(SEEDS), intervals=False))
            units = [unit for unit, d in enumerate(by_task) for _ in d]
            whole = follow([d for task in by_task for d in task], one_look(SEEDS), units, intervals=False)
            wrong["study"] += any(map(told, whole))
        yield {"tasks": tasks, **{family: count / studies for family, count in wrong.items()}}
