"""Measures in simulated studies how often a study's statistics are wrong, and how often they find an effect.

    python benchmarks/calibration.py --out benchmarks/calibration.json

The parts are error and coverage of the designs of tuning, the power of the test with several constants c, error and
coverage by distribution and number of seeds, the runs that sequential looks save, in `calibration_choices` how seeds
choose, candidates that failed and families of tasks, in `calibration_margins` verdicts by a margin, in
`calibration_looks` differences that were decided early, in `calibration_tasks` means over tasks, in
`calibration_trends` the predictions of ladders and Kendall's tau between tasks, and in `calibration_unbalanced` more
seeds of the base. The figures of the test come from p
alone, computed for many studies at a time. Some of the studies also go through `deltalab.statistics.joint_test`,
which must find the same verdicts, and intervals that agree with the verdicts. The script takes four hours on one core.
"""

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from calibration_choices import choices, failures, families
from calibration_further import further_looks
from calibration_looks import early_decisions
from calibration_margins import margins
from calibration_tasks import over_tasks_coverage, over_tasks_error, over_tasks_power
from calibration_trends import extrapolation, transfer_tau
from calibration_unbalanced import unbalanced_error, unbalanced_power, unbalanced_tuned
from numpy.typing import NDArray
from scipy import stats

import deltalab
from deltalab.statistics import joint_test
from deltalab.statistics.joint_test import ALPHA, Look, flips, one_look
from deltalab.statistics.looks import spread_looks

ARMS = 7
"""Arms beside the base."""
EFFECT = 2.0
"""Standard deviations of a seed's score."""
NOISES = (0, 1, 2, 4)
"""The losses of the candidates at the ends of the range, in standard deviations of a seed's score."""
AT_ONCE = 2_000_000
"""Statistics in memory at a time."""

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Constant = Callable[[Array, Array], Array | float]
"""Computes c from the rms over seeds [R, arms, 1] and the sd over seeds under each flip [R, arms, E]."""

CONSTANTS: dict[str, Constant] = {
    "0: studentized alone": lambda rms, sd: 0.0,
    "median rms / 2": lambda rms, sd: np.median(rms, axis=1, keepdims=True) / 2,
    "median rms / sqrt(2)": lambda rms, sd: np.median(rms, axis=1, keepdims=True) / math.sqrt(2),
    "median rms": lambda rms, sd: np.median(rms, axis=1, keepdims=True),
    "median rms x sqrt(2)": lambda rms, sd: np.median(rms, axis=1, keepdims=True) * math.sqrt(2),
    "lower quartile of rms": lambda rms, sd: np.quantile(rms, 0.25, axis=1, keepdims=True),
    "least rms": lambda rms, sd: rms.min(axis=1, keepdims=True),
    "median sd under each flip": lambda rms, sd: np.median(sd, axis=1, keepdims=True),
    "infinite: the plain mean": lambda rms, sd: 1e9 * rms.max(axis=1, keepdims=True),
}
USED = "median rms / sqrt(2)"
"""The constant of `deltalab.statistics.joint_test`."""


def follow(
    d: Array, looks: Sequence[Look], constant: Constant = CONSTANTS[USED], hopeless: float = joint_test.HOPELESS
) -> tuple[Mask, NDArray[np.int64], Mask]:
    """Computes `joint_test.follow` of many studies at once, without intervals.

    Args:
        d: The differences to the base [R, arms, seeds].
        looks: The looks.
        constant: The constant c of the statistic.
        hopeless: The prospect below which an arm is given up.

    Returns:
        The arms that are told from the base, the seeds that each arm took, and the arms that the family decided, each
        [R, arms].
    """
    per = max(1, AT_ONCE // (d.shape[1] * len(flips(looks[-1].seeds))))
    parts = [_follow(d[at : at + per], looks, constant, hopeless) for at in range(0, len(d), per)]
    told, seeds, members = (np.concatenate(part) for part in zip(*parts, strict=True))
    return told, seeds, members


def _follow(
    d: Array, looks: Sequence[Look], constant: Constant, hopeless: float
) -> tuple[Mask, NDArray[np.int64], Mask]:
    told, members = np.zeros(d.shape[:2], bool), np.zeros(d.shape[:2], bool)
    stop = np.full(d.shape[:2], looks[-1].seeds)
    running = np.ones(d.shape[:2], bool)
    for k, look in enumerate(looks):
        so_far = looks[: k + 1]
        rows = np.flatnonzero(running.any(1))
        while len(rows):  # step down
            p = p_values(d[rows], so_far, stop[rows], members[rows], constant)
            p[~running[rows] | members[rows]] = np.inf
            hit = p.min(1) <= ALPHA
            rows, arm = rows[hit], p.argmin(1)[hit]
            members[rows, arm] = True
        decided = members & running
        for j in range(d.shape[1]):
            rows = np.flatnonzero(decided[:, j])
            if len(rows):
                others = members[rows]
                others[:, j] = False
                decided[rows, j] = p_values(d[rows], so_far, stop[rows], others, constant)[:, j] <= ALPHA
        told |= decided
        ends = decided | (k == len(looks) - 1)
        if k < len(looks) - 1:
            ends |= prospects(d[..., : look.seeds], look.seeds / looks[-1].seeds) < hopeless
        stop[running & ends] = look.seeds
        running &= ~ends
    return told, stop, members


def p_values(d: Array, looks: Sequence[Look], stop: NDArray[np.int64], members: Mask, constant: Constant) -> Array:
    """Computes p of "no difference" for each arm [R, arms] that is not among the members."""
    signs = flips(looks[-1].seeds)
    gone = np.zeros((len(d), len(signs)), bool)
    for look in looks[:-1]:
        largest = _statistics(d, stop, members, signs[:, : look.seeds], constant).max(1)
        most = math.floor(look.spent * len(signs) * (1 + 1e-9)) - gone.sum(1)
        left = -np.sort(-np.where(gone, -1.0, largest), axis=1)
        bound = np.take_along_axis(left, np.clip(most, 0, len(signs) - 1)[:, None], axis=1)
        gone |= largest * joint_test._EQUAL > bound
    t = _statistics(d, stop, members, signs, constant)
    largest = t.max(1)
    observed = t[:, :, 0] * joint_test._EQUAL
    p = np.stack([(gone | (largest >= observed[:, j, None])).mean(1) for j in range(d.shape[1])], axis=1)
    return np.minimum(p * ALPHA / looks[-1].spent, 1.0)


def _statistics(d: Array, stop: NDArray[np.int64], members: Mask, signs: Array, constant: Constant) -> Array:
    """The statistics T [R, arms, E] under each flip."""
    n = signs.shape[1]
    counts = np.minimum(stop, n)[..., None]
    seen = np.arange(n) < counts
    x = d[..., :n]
    centred = (x - (x * seen).sum(-1, keepdims=True) / counts) * np.sqrt(counts / (counts - 1))
    x = np.where(members[..., None], centred, x)
    x = np.take_along_axis(x, np.arange(n) % counts, axis=-1)
    squares = (x**2).mean(-1, keepdims=True)
    mean = np.abs(x @ signs.T) / n
    sd = np.sqrt(np.maximum(squares - mean**2, 0.0) * (n / (n - 1)))
    size = sd + constant(np.sqrt(squares), sd)
    t: Array = math.sqrt(n) * np.divide(mean, size, out=np.zeros_like(mean), where=size > 0)
    return t


def prospects(d: Array, t: float) -> Array:
    """Computes `joint_test._prospect` of many arms [R, arms]."""
    n = d.shape[-1]
    spread = d.std(-1, ddof=1)
    ratio = np.divide(abs(d.mean(-1)), spread, out=np.full(spread.shape, np.inf), where=spread > 0)
    z = -stats.norm.ppf(stats.t.sf(math.sqrt(n) * ratio, n - 1))
    probability = stats.norm.cdf((z / math.sqrt(t) + stats.norm.ppf(ALPHA / (2 * d.shape[1]))) / math.sqrt(1 - t))
    return np.where(spread > 0, probability, d.any(-1))


def covered(d: Array, truth: Array, members: Mask) -> Mask:
    """Computes whether all intervals of a study hold the true differences [arms], after a single look [R]."""
    looks, stop, hold = one_look(d.shape[-1]), np.full(d.shape[:2], d.shape[-1]), np.ones(len(d), bool)
    per = max(1, AT_ONCE // (d.shape[1] * len(flips(d.shape[-1]))))
    for at in range(0, len(d), per):
        part = slice(at, at + per)
        for j in range(d.shape[1]):
            shifted, others = d[part].copy(), members[part].copy()
            shifted[:, j] -= truth[j]
            others[:, j] = False
            hold[part] &= p_values(shifted, looks, stop[part], others, CONSTANTS[USED])[:, j] > ALPHA
    return hold


@dataclass
class Checked:
    """Compares verdicts and intervals of `joint_test.follow` with the fast path.

    Attributes:
        per: The studies of each kind that are compared.
        studies: The number of studies so far.
        rows: The number of arms so far.
        contradictions: The number of arms whose interval contradicts p.
        differ: The number of arms whose verdict or seeds differ from the fast path.
    """

    per: int
    studies: int = 0
    rows: int = 0
    contradictions: int = 0
    differ: int = 0

    def add(self, d: Array, looks: Sequence[Look], told: Mask, seeds: NDArray[np.int64]) -> None:
        """Compares the first studies of a kind."""
        for study, verdicts, counts in list(zip(d, told, seeds, strict=True))[: self.per]:
            outcomes = joint_test.follow(list(study), looks)
            self.studies += 1
            for outcome, verdict, n in zip(outcomes, verdicts, counts, strict=True):
                difference = outcome.difference
                self.rows += 1
                self.contradictions += (difference.p <= ALPHA) != difference.decided
                self.differ += bool(difference.decided != verdict or difference.n != n)


@dataclass
class Bench:
    """The settings of a run of this script.

    Attributes:
        repeats: The studies of each kind.
        checked: The comparison with deltalab's statistics.
        random: The source of random numbers.
    """

    repeats: int
    checked: Checked
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(15))

    def single(self, d: Array) -> tuple[Mask, Mask]:
        """Returns the arms that fixed designs tell from the base, and the arms that the family decided."""
        looks = one_look(d.shape[-1])
        told, seeds, members = follow(d, looks)
        self.checked.add(d, looks, told, seeds)
        return told, members


def normal(random: np.random.Generator, repeats: int, seeds: int) -> Array:
    """Draws scores of the base and the arms [R, 1 + ARMS, seeds]."""
    return random.normal(size=(repeats, 1 + ARMS, seeds))


def differences(scores: Array) -> Array:
    """Returns the differences of the arms to the base."""
    return scores[:, 1:] - scores[:, :1]


# Part 1: the design of tuning.


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


# Part 2: power.

SETTINGS = {
    "equal variances": 9,
    "one arm with 10 times the sd": 9,
    "two arms collapse on a fifth of the seeds": 9,
    "equal variances, 7 seeds": 7,
}


def setting(random: np.random.Generator, name: str, repeats: int, effect: float) -> Array:
    """Draws scores with an effect on arm 1, and with a spread of the last arms that the name describes."""
    scores = normal(random, repeats, SETTINGS[name])
    scores[:, 1] += effect
    if name.startswith("one arm"):
        scores[:, -1] *= 10
    if name.startswith("two arms"):
        scores[:, -2:] -= 20 * (random.random(scores[:, -2:].shape) < 0.2)
    return scores


def powers(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the power of the test with each constant, in each setting."""
    for name, seeds in SETTINGS.items():
        d = differences(setting(bench.random, name, bench.repeats, EFFECT))
        bench.single(d)
        yield {"setting": name, "constant": "separate tests", "power": float(separate_tests(d)[0][:, 0].mean())}
        for constant in CONSTANTS:
            told = follow(d, one_look(seeds), CONSTANTS[constant])[0]
            yield {"setting": name, "constant": constant, "power": float(told[:, 0].mean())}


# Part 3: distributions.

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


# Part 4: seeds in looks.

LOOKS = (6, 15)


def sequential(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures error, power and seeds of a sequential design, with a fixed design of the same power."""
    looks, repeats = spread_looks(*LOOKS), max(1, bench.repeats // 2)
    for effects, size in ((0, 0.0), (1, 1.5), (1, 2.0), (2, 2.0)):
        scores = normal(bench.random, repeats, LOOKS[1])
        scores[:, 1 : 1 + effects] += size
        d = differences(scores)
        told, counts, _ = follow(d, looks)
        few = slice(bench.checked.per // 4)  # a study takes most of a second
        bench.checked.add(d[few], looks, told[few], counts[few])
        runs = counts.sum(1) + counts.max(1)  # the base goes on while any arm does
        row: dict[str, Any] = {
            "effects": effects,
            "size": size,
            "error": float(told[:, effects:].any(1).mean()),
            "seeds_per_arm": float(runs.mean() / (1 + ARMS)),
        }
        if effects:
            row["power"] = float(told[:, :effects].mean())
            row["fixed_seeds"] = as_powerful(bench, effects, size, row["power"])
            row["ratio"] = row["seeds_per_arm"] / row["fixed_seeds"]
        yield row


def as_powerful(bench: Bench, effects: int, size: float, power: float) -> float:
    """Returns the number of seeds with which a fixed design has a power, interpolated."""
    before = 0.0
    for seeds in range(6, 40):
        scores = normal(bench.random, bench.repeats, seeds)
        scores[:, 1 : 1 + effects] += size
        measured = float(follow(differences(scores), one_look(seeds))[0][:, :effects].mean())
        if measured >= power:
            return seeds - (measured - power) / (measured - before) if before else float(seeds)
        before = measured
    raise AssertionError(f"no fixed design of fewer than 40 seeds has a power of {power}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="writes the figures as JSON")
    parser.add_argument("--repeats", type=int, default=6000, help="studies of each kind")
    parser.add_argument("--checks", type=int, default=10, help="studies of each kind that go through deltalab's own")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some of the parts")
    options = parser.parse_args()
    start = time.perf_counter()
    bench = Bench(options.repeats, Checked(options.checks))
    figures: dict[str, list[dict[str, Any]]] = {}
    for name, part in PARTS.items():
        if not options.only or name in options.only:
            figures[name] = []
            for row in part(bench):
                print(" ".join(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
                figures[name].append(row)
    checked = {key: value for key, value in vars(bench.checked).items() if key != "per"}
    print(checked, f"{time.perf_counter() - start:.0f} s")
    if bench.checked.differ:
        raise SystemExit("the fast path and deltalab.statistics.joint_test differ")
    if options.out:
        report = {
            "repeats": options.repeats,
            "arms": ARMS,
            "effect": EFFECT,
            "candidates": CANDIDATES,
            "constant": USED,
            "seed": 15,
            "seconds": round(time.perf_counter() - start),
            "checked": checked,
            "machine": {"device": platform.machine(), "cores": os.cpu_count(), "system": platform.platform()},
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "scipy": scipy.__version__,
                "deltalab": deltalab.__version__,
            },
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **figures,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


PARTS: dict[str, Callable[[Bench], Iterator[dict[str, Any]]]] = {
    part.__name__: part
    for part in (
        designs,
        powers,
        distributions,
        sequential,
        early_decisions,
        choices,
        failures,
        families,
        further_looks,
        margins,
        over_tasks_error,
        over_tasks_coverage,
        over_tasks_power,
        extrapolation,
        transfer_tau,
        unbalanced_error,
        unbalanced_tuned,
        unbalanced_power,
    )
}

if __name__ == "__main__":
    main()
