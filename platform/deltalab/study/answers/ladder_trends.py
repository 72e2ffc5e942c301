"""What a ladder says of each arm: how its difference to the base goes with size, and whether a fit predicts it.

The test of a trend, for arm j and seed s with differences d_jsi at sizes of compute C_i, x_i = log10 C_i:

    slope_js = sum_i (x_i - mean x) d_jsi / sum_i (x_i - mean x)^2

Under "no trend" a seed's slope is as likely to have the opposite sign. `joint.compare` tests the slopes of all arms
together, by flips of whole seeds. The test is exact where, at every size, the noise of a difference is symmetric; a
constant difference to the base has slopes of pure noise.

The fit is L = a + b C^-c with a, b >= 0, by least squares, of the mean loss of an arm against its compute (Kaplan et
al. 2020, arXiv:2001.08361; the offset as in Henighan et al. 2020, arXiv:2010.14701).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalab.errors import InputError
from deltalab.store import Arm
from deltalab.study.answers.recorded_scores import Measured
from deltalab.study.specs.ladder_sizes import PARAMETERS, Scales, rates
from deltalab.study.statistics.intervals import Interval
from deltalab.study.statistics.joint_test import Difference, Outcome, compare
from deltalab.study.statistics.seed_choice import Scores

Array = NDArray[np.float64]
Verdict = Literal["holds", "shrinks", "reverses", "not decidable"]

BACKWARD = 3
"""The operations of a training step over those of its forward pass."""
RESAMPLES = 1000
EXPONENTS = np.geomspace(0.02, 2.0, 120)
"""The values of c that a fit tries."""


@dataclass(frozen=True)
class Size:
    """A size of a ladder. label: the task's name there. values: what it sets, by path. compute: of the base's training,
    in operations of matrix products."""

    label: str
    values: dict[str, int]
    compute: float


@dataclass(frozen=True)
class Fit:
    """L = a + b C^-c, with C over the compute of the base's smallest size; low and high: 95% bootstrap over seeds."""

    a: float
    b: float
    c: float
    low: tuple[float, float, float]
    high: tuple[float, float, float]


@dataclass(frozen=True)
class Prediction:
    """An arm's difference in loss at a size that the fits left out.

    predicted: from the fits of arm and base. measured: there. miss: predicted minus measured. Intervals are 95%
    bootstraps over seeds. agrees: whether the interval of the miss holds 0.
    """

    label: str
    predicted: Interval
    measured: Interval
    miss: Interval
    agrees: bool


@dataclass(frozen=True)
class ArmLadder:
    """An arm on all sizes of a task. differences: by size, jointly over sizes and arms. slope: per tenfold compute.

    fit: of the loss; None for too few sizes. predictions: of the sizes that the fit left out.
    """

    arm: str
    verdict: Verdict | Literal["base"]
    differences: list[Difference]
    slope: Difference | None
    fit: Fit | None
    predictions: list[Prediction]


@dataclass(frozen=True)
class Ladder:
    """The arms of a study on all sizes of one task. notes: what to know when reading it."""

    task: str
    metric: str
    maximize: bool
    sizes: list[Size]
    arms: list[ArmLadder]
    notes: list[str]


def ladders(
    spec: Mapping[str, Any],
    tasks: Mapping[str, Mapping[str, Any]],
    arms: Sequence[Arm],
    ledger: Measured,
    scores: Mapping[str, Scores],
    compared: Mapping[str, Mapping[str, Outcome]],
) -> list[Ladder]:
    """The ladder of each task of which every size has been run; [] for a study without `scales`.

    spec: of the study as the ledger has it. tasks: what its provenance says of each task at each size, by label.
    scores, compared: of each of these.
    """
    if not spec.get("scales"):
        return []
    scales = Scales.model_validate(spec["scales"])
    whole = {}
    for task in spec["task"]:
        labels = [scales.label(task, size) for size in range(len(scales))]
        base = scores[labels[0]].base
        computes = [_compute(ledger, tasks[label], base, label) for label in labels]
        if None not in computes:
            sizes = [Size(label, scales.at(i), computes[i] or 0.0) for i, label in enumerate(labels)]
            whole[task] = _Rungs(sizes, [scores[label] for label in labels])
    units = [task for task, rungs in whole.items() for _ in rungs.complete]
    slopes = [rungs.slopes(arm) for rungs in whole.values() for arm in rungs.complete]
    families = [list(whole)] if spec.get("family") == "study" else [[task] for task in whole]
    trends: dict[tuple[str, str], Difference] = {}
    names = [(task, arm) for task, rungs in whole.items() for arm in rungs.complete]
    for family in families:
        own = [i for i, unit in enumerate(units) if unit in family]
        found = compare([slopes[i] for i in own], [family.index(units[i]) for i in own])
        trends |= {names[i]: trend for i, trend in zip(own, found, strict=True)}
    return [_ladder(task, rungs, scales, tasks, arms, ledger, compared, trends) for task, rungs in whole.items()]


@dataclass(frozen=True)
class _Rungs:
    """The sizes of one task, with the scores of all arms at each."""

    sizes: list[Size]
    scores: list[Scores]

    @property
    def base(self) -> str:
        return self.scores[0].base

    @property
    def complete(self) -> list[str]:
        """The arms beside the base that have results at every size."""
        return [arm for arm in self.scores[0].others if all(arm in one.others for one in self.scores)]

    def slopes(self, arm: str) -> Array:
        differences = np.array([one.differences(arm) for one in self.scores])
        return slopes(differences, [size.compute for size in self.sizes])


def slopes(differences: ArrayLike, compute: Sequence[float]) -> Array:
    """The slope of each seed's differences [sizes, seeds] against log10 compute: [seeds].

    >>> slopes([[0.1, 0.2], [0.2, 0.2], [0.3, 0.2]], [1e9, 1e10, 1e11]).round(3).tolist()
    [0.1, 0.0]
    """
    x = np.log10(np.asarray(compute, dtype=float))
    x = x - x.mean()
    found: Array = x @ np.asarray(differences, dtype=float) / (x @ x)
    return found


def verdict(differences: Sequence[Difference], slope: Difference) -> Verdict:
    """What a ladder says of an arm; "told" is: by an interval that leaves out 0.

    reverses: the difference is told at the largest size and, with the opposite sign, at a smaller one, and the slope is
        told with the sign of the largest.
    shrinks: the difference is told at a size below the largest, and the slope is told with the opposite sign.
    holds: the difference is told at the largest size, at no smaller one with the opposite sign, and does not shrink.
    not decidable: anything else.

    Both `reverses` and `shrinks` need a slope that is told, so that without a trend they appear in at most 5% of
    families.
    """
    signs = [_sign(difference) for difference in differences]
    lead, last, trend = next((sign for sign in signs[:-1] if sign), 0), signs[-1], _sign(slope)
    if lead and last == -lead and trend == last:
        return "reverses"
    if lead and trend == -lead:
        return "shrinks"
    if last and lead in (0, last):
        return "holds"
    return "not decidable"


def _sign(difference: Difference) -> int:
    return (1 if difference.mean > 0 else -1) if difference.decided else 0


def fit(compute: ArrayLike, loss: ArrayLike) -> tuple[Array, Array, Array]:
    """a, b and c of a + b C^-c by least squares, a and b at least 0, for losses [.., sizes]: [..] each.

    compute [sizes]: in any unit; b is in its terms. c is one of `EXPONENTS`.

    Raises `InputError` for fewer sizes than parameters.

    >>> a, b, c = fit([1, 10, 100, 1000], [3.0, 2.1, 2.01, 2.001])
    >>> round(float(a), 2), round(float(b), 2), round(float(c), 1)
    (2.0, 1.0, 1.0)
    """
    x, y = np.asarray(compute, dtype=float), np.asarray(loss, dtype=float)
    if x.size < PARAMETERS:
        raise InputError(f"a fit of a + b C^-c has {PARAMETERS} parameters and needs as many sizes, not {x.size}")
    best = np.full(y.shape[:-1], math.inf)
    found = [np.zeros(y.shape[:-1]) for _ in range(3)]
    mean = y.mean(-1)
    for c in EXPONENTS:
        power = x**-c
        away = power - power.mean()
        b = np.maximum((y @ away) / (away @ away), 0.0)
        a = mean - b * power.mean()
        through = np.maximum((y @ power) / (power @ power), 0.0)
        a, b = np.where(a < 0, 0.0, a), np.where(a < 0, through, b)
        wrong = ((y - a[..., None] - b[..., None] * power) ** 2).sum(-1)
        better = wrong < best
        best = np.where(better, wrong, best)
        found = [np.where(better, new, old) for new, old in zip((a, b, np.full_like(a, c)), found, strict=True)]
    return found[0], found[1], found[2]


def _ladder(
    task: str,
    rungs: _Rungs,
    scales: Scales,
    tasks: Mapping[str, Mapping[str, Any]],
    arms: Sequence[Arm],
    ledger: Measured,
    compared: Mapping[str, Mapping[str, Outcome]],
    trends: Mapping[tuple[str, str], Difference],
) -> Ladder:
    labels = [size.label for size in rungs.sizes]
    about, base = tasks[labels[0]], rungs.base
    left_out, said = scales.left_out, rates(scales, ledger.spec.get("tune") or ())
    notes = [f"{said[0].upper()}{said[1:]}."] if said else []
    losses: dict[str, Array] = {}
    computes: dict[str, list[float]] = {}
    for arm in (base, *rungs.complete):
        found = [_compute(ledger, tasks[label], arm, label) for label in labels]
        per_seed = _losses(ledger, rungs, arm)
        if None not in found and per_seed.shape[1]:
            computes[arm] = [(value or 0.0) / rungs.sizes[0].compute for value in found]
            losses[arm] = per_seed
    if left_out is None:
        notes.append(
            f"No fit of loss against compute: its {PARAMETERS} parameters and a size to predict need "
            f"{PARAMETERS + 1} sizes, and there are {len(scales)}."
        )
    resampled = _Resampled(losses, computes, left_out)
    rows = []
    for name in (arm.name for arm in arms):
        own_fit = resampled.fits.get(name)
        if name == base:
            rows.append(ArmLadder(base, "base", [], None, own_fit, []))
        elif name in rungs.complete:
            differences = [compared[label][name].difference for label in labels]
            slope, predictions = trends[task, name], resampled.predictions(name, base, labels)
            rows.append(ArmLadder(name, verdict(differences, slope), differences, slope, own_fit, predictions))
        else:
            notes.append(f"{name} has no results at every size.")
    return Ladder(task, about["metric"], about["maximize"], rungs.sizes, rows, notes)


class _Resampled:
    """Fits of the mean losses of every arm, and of means over seeds drawn with replacement, the same for all arms.

    losses: of each arm [sizes, seeds]. computes: of each arm by size. left_out: how many of the largest sizes are not
    fitted; None for no fits.
    """

    def __init__(self, losses: Mapping[str, Array], computes: Mapping[str, list[float]], left_out: int | None) -> None:
        self.fits: dict[str, Fit] = {}
        self.left_out = left_out
        self._computes = computes
        self._means: dict[str, Array] = {}
        self._drawn: dict[str, tuple[Array, Array, Array]] = {}
        if left_out is None or not losses:
            return
        seeds = min(found.shape[1] for found in losses.values())
        # The first resample is the seeds themselves.
        draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
        draws = np.concatenate([np.arange(seeds)[None], draws])
        for arm, found in losses.items():
            means = np.array([found[:, drawn].mean(1) for drawn in draws])
            kept = means.shape[1] - left_out
            a, b, c = fit(computes[arm][:kept], means[:, :kept])
            self._means[arm], self._drawn[arm] = means, (a, b, c)
            low, high = ([float(np.quantile(part[1:], q)) for part in (a, b, c)] for q in (0.025, 0.975))
            self.fits[arm] = Fit(float(a[0]), float(b[0]), float(c[0]), tuple(low), tuple(high))  # type: ignore[arg-type]

    def predictions(self, arm: str, base: str, labels: Sequence[str]) -> list[Prediction]:
        if arm not in self.fits or base not in self.fits or not self.left_out:
            return []
        found = []
        for size in range(len(labels) - self.left_out, len(labels)):
            predicted = self._at(arm, size) - self._at(base, size)
            measured = self._means[arm][:, size] - self._means[base][:, size]
            miss = _interval(predicted - measured)
            found.append(
                Prediction(labels[size], _interval(predicted), _interval(measured), miss, miss.low <= 0.0 <= miss.high)
            )
        return found

    def _at(self, arm: str, size: int) -> Array:
        a, b, c = self._drawn[arm]
        at: Array = a + b * self._computes[arm][size] ** -c
        return at


def _interval(resamples: Array) -> Interval:
    """The first value, and the 95% interval of the others."""
    low, high = np.quantile(resamples[1:], (0.025, 0.975))
    return Interval(float(resamples[0]), float(low), float(high), len(resamples) - 1)


def _compute(ledger: Measured, about: Mapping[str, Any], arm: str, label: str) -> float | None:
    """Operations of matrix products that an arm's training takes; None where no trial of it is done."""
    for trial in ledger.of(arm, label):
        flops = ledger.finals.get(trial.key, {}).get(("cost", "flops_per_token"), {})
        if flops:
            train = trial.config["train"]
            tokens = train["steps"] * train["batch_size"] * about["length"]
            return BACKWARD * float(next(iter(flops.values()))) * float(tokens)
    return None


def _losses(ledger: Measured, rungs: _Rungs, arm: str) -> Array:
    """The test loss of the run that each seed chose [sizes, seeds], of the seeds that finished at every size."""
    rows = []
    for size, scores in zip(rungs.sizes, rungs.scores, strict=True):
        runs = ledger.runs(ledger.of(arm, size.label), "loss")
        chosen = {seed: scores.choice(arm, seed) for seed in scores.results[arm]}
        rows.append({seed: math.nan if number is None else runs[number][seed].test for seed, number in chosen.items()})
    seeds = [seed for seed in rows[0] if all(math.isfinite(row.get(seed, math.nan)) for row in rows)]
    return np.array([[row[seed] for seed in seeds] for row in rows])
