"""Tests how each arm's difference to the base changes with model size, and whether a fit predicts the difference.

Arm j has with seed s the difference d_jsi to the base at size i, whose training takes compute C_i. With
x_i = log10 C_i, the trend is

    slope_js = sum_i (x_i - mean x) d_jsi / sum_i (x_i - mean x)^2

Under "no trend", a seed's slope is as likely to have the opposite sign. `joint_test.compare` tests the slopes of all
arms together, by flips of whole seeds. The test is exact if the noise of a difference is symmetric at every size: the
slopes of a difference that is the same at all sizes are then pure noise.

The fit L = a + b C^-c with a, b >= 0 describes the mean loss L of an arm by its compute C, by least squares (Kaplan et
al. 2020, arXiv:2001.08361; the offset a as in Henighan et al. 2020, arXiv:2010.14701).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalab.errors import InputError
from deltalab.store import Arm
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.specs.ladder_sizes import PARAMETERS, learning_rates_text
from deltalab.study.specs.recorded_study import RecordedTask
from deltalab.study.statistics.intervals import Interval
from deltalab.study.statistics.joint_test import Difference, Outcome, compare
from deltalab.study.statistics.pairs import Contrast, Pairs
from deltalab.study.statistics.seed_choice import Scores

Array = NDArray[np.float64]
Verdict = Literal["holds", "shrinks", "reverses", "not decidable"]

BACKWARD = 3
"""The operations of a training step, divided by the operations of its forward pass."""
RESAMPLES = 1000
"""The number of bootstrap resamples of the seeds, from which the intervals of a fit come."""
EXPONENTS = np.geomspace(0.02, 2.0, 120)
"""The values of c that a fit tries."""


@dataclass(frozen=True)
class Size:
    """A size of a ladder.

    Attributes:
        label: The name of the task at this size.
        values: The settings of the size, by path.
        compute: The operations of matrix products in the base's training.
    """

    label: str
    values: dict[str, int]
    compute: float


@dataclass(frozen=True)
class Fit:
    """A fit L = a + b C^-c of loss against compute.

    Attributes:
        a: The loss that remains at any compute.
        b: The loss beyond a at C = 1, which is the compute of the base's smallest size.
        c: The exponent.
        low: The lower ends of the 95% intervals of a, b and c, from a bootstrap over seeds.
        high: The upper ends of the same intervals.
    """

    a: float
    b: float
    c: float
    low: tuple[float, float, float]
    high: tuple[float, float, float]


@dataclass(frozen=True)
class Prediction:
    """An arm's difference in loss at a size that the fits left out. Intervals are 95% bootstraps over seeds.

    Attributes:
        label: The name of the task at this size.
        predicted: The fitted loss of the arm minus the fitted loss of the base.
        measured: The difference that was measured at this size.
        miss: Predicted minus measured.
        agrees: Whether the interval of the miss holds 0.
    """

    label: str
    predicted: Interval
    measured: Interval
    miss: Interval
    agrees: bool


@dataclass(frozen=True)
class ArmLadder:
    """The results of an arm at all sizes of a task.

    Attributes:
        arm: The name of the arm.
        verdict: How the difference changes with size, in a word; see `verdict`.
        differences: The difference to the base at each size; intervals hold jointly over sizes and arms.
        slope: The change of the difference per tenfold compute; None for the base.
        fit: The fit of the loss; None with too few sizes.
        predictions: One for each size that the fit left out.
    """

    arm: str
    verdict: Verdict | Literal["base"]
    differences: list[Difference]
    slope: Difference | None
    fit: Fit | None
    predictions: list[Prediction]


@dataclass(frozen=True)
class TaskLadder:
    """The arms of a study on all sizes of one task.

    Attributes:
        task: The name of the task in the study's file.
        metric: The metric that is compared.
        maximize: Whether more of the metric is better.
        sizes: The sizes, the smallest first.
        arms: A line for each arm, in the order of the study.
        notes: Sentences that explain how to read the ladder.
    """

    task: str
    metric: str
    maximize: bool
    sizes: list[Size]
    arms: list[ArmLadder]
    notes: list[str]


def ladders(
    arms: Sequence[Arm],
    ledger: RecordedScores,
    scores: Mapping[str, Scores],
    outcomes: Mapping[str, Mapping[str, Outcome]],
) -> list[TaskLadder]:
    """Returns a ladder for each task that has been run at every size; [] for a study without `scales`.

    Args:
        arms: The arms of the study, in order.
        ledger: The study's trials and their metrics.
        scores: The runs of all arms, by the label of a task at one size.
        outcomes: The test's outcome for each arm, by the label of a task at one size.
    """
    spec = ledger.spec
    if not spec.is_ladder:
        return []
    complete = {}
    for task in spec.tasks:
        labels = [spec.scales.label(task, size) for size in range(len(spec.scales))]
        base = scores[labels[0]].base
        computes = [_compute(ledger, ledger.tasks[label], base) for label in labels]
        if None not in computes:
            sizes = [Size(label, spec.scales.at(i), computes[i] or 0.0) for i, label in enumerate(labels)]
            complete[task] = _Rungs(sizes, [scores[label] for label in labels])
    families = [list(complete)] if spec.is_one_family else [[task] for task in complete]
    trends: dict[tuple[str, str], Difference] = {}
    for family in families:
        members = [(task, arm) for task in family for arm in complete[task].complete_arms]
        trend = [complete[task].slopes(arm) for task, arm in members]
        tested = compare(trend, [family.index(task) for task, _ in members])
        trends |= dict(zip(members, tested, strict=True))
    return [_ladder(task, rungs, arms, ledger, outcomes, trends) for task, rungs in complete.items()]


@dataclass(frozen=True)
class _Rungs:
    """The sizes of one task, with the scores of all arms at each."""

    sizes: list[Size]
    scores: list[Scores]

    @property
    def base(self) -> str:
        """The name of the base."""
        return self.scores[0].base

    @property
    def complete_arms(self) -> list[str]:
        """The arms other than the base that have results at every size."""
        return [arm for arm in self.scores[0].others if all(arm in at_size.others for at_size in self.scores)]

    def slopes(self, arm: str) -> Contrast:
        """The slope of each seed's difference between an arm and the base."""
        return slopes([at_size.pairs(arm) for at_size in self.scores], [size.compute for size in self.sizes])


def slopes(pairs: Sequence[Pairs], compute: Sequence[float]) -> Contrast:
    """Returns the slope of each seed's differences against log10 compute.

    Args:
        pairs: The runs of arm and base at each size.
        compute: The compute at each size.

    Examples:
        >>> differences = [Pairs.plain(d) for d in ([0.1, 0.2], [0.2, 0.2], [0.3, 0.2])]
        >>> slopes(differences, [1e9, 1e10, 1e11]).differences.round(3).tolist()
        [0.1, 0.0]
    """
    x = np.log10(np.asarray(compute, dtype=float))
    x = x - x.mean()
    return Contrast(tuple(pairs), tuple(x / (x @ x)))


def verdict(differences: Sequence[Difference], slope: Difference) -> Verdict:
    """Returns a word for how an arm's difference to the base changes with size.

    A difference or slope is decided if its interval leaves out 0. The first of these verdicts that fits is
    returned:

    - reverses: the difference is decided at the largest size and, with the opposite sign, at a smaller size; the slope
      is decided with the sign of the largest size.
    - shrinks: the difference is decided at a size below the largest, and the slope is decided with the opposite sign.
    - holds: the difference is decided at the largest size, and at no smaller size with the opposite sign.
    - not decidable: anything else.

    Both `reverses` and `shrinks` need a slope that is decided, so that without a trend they appear in at most 5% of
    families.

    Args:
        differences: The difference to the base at each size, the smallest size first.
        slope: The change of the difference per tenfold compute.
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
    """The sign of a decided difference; 0 if it is not decided."""
    return (1 if difference.mean > 0 else -1) if difference.decided else 0


def fit(compute: ArrayLike, loss: ArrayLike) -> tuple[Array, Array, Array]:
    """Fits loss = a + b C^-c by least squares, with a and b at least 0 and c one of `EXPONENTS`.

    Args:
        compute: The compute C at each size [sizes], in any unit. The unit of b depends on it.
        loss: The losses [..., sizes].

    Returns:
        a, b and c, each of the shape [...].

    Raises:
        InputError: There are fewer sizes than parameters.

    Examples:
        >>> a, b, c = fit([1, 10, 100, 1000], [3.0, 2.1, 2.01, 2.001])
        >>> round(float(a), 2), round(float(b), 2), round(float(c), 1)
        (2.0, 1.0, 1.0)
    """
    x, y = np.asarray(compute, dtype=float), np.asarray(loss, dtype=float)
    if x.size < PARAMETERS:
        raise InputError(f"a fit of a + b C^-c has {PARAMETERS} parameters and needs as many sizes, not {x.size}")
    least_error = np.full(y.shape[:-1], math.inf)
    best = [np.zeros(y.shape[:-1]) for _ in range(3)]
    mean = y.mean(-1)
    for c in EXPONENTS:
        power = x**-c
        centred = power - power.mean()
        b = np.maximum((y @ centred) / (centred @ centred), 0.0)
        a = mean - b * power.mean()
        b_without_offset = np.maximum((y @ power) / (power @ power), 0.0)
        a, b = np.where(a < 0, 0.0, a), np.where(a < 0, b_without_offset, b)
        error = ((y - a[..., None] - b[..., None] * power) ** 2).sum(-1)
        better = error < least_error
        least_error = np.where(better, error, least_error)
        best = [np.where(better, new, old) for new, old in zip((a, b, np.full_like(a, c)), best, strict=True)]
    return best[0], best[1], best[2]


def _ladder(
    task: str,
    rungs: _Rungs,
    arms: Sequence[Arm],
    ledger: RecordedScores,
    outcomes: Mapping[str, Mapping[str, Outcome]],
    trends: Mapping[tuple[str, str], Difference],
) -> TaskLadder:
    """The ladder of one task. `trends` are the slopes by task and arm."""
    labels = [size.label for size in rungs.sizes]
    at_smallest, base, scales = ledger.tasks[labels[0]], rungs.base, ledger.spec.scales
    left_out, rates_text = scales.left_out, learning_rates_text(scales, ledger.spec.values.get("tune") or ())
    notes = [f"{rates_text[0].upper()}{rates_text[1:]}."] if rates_text else []
    losses: dict[str, Array] = {}
    computes: dict[str, list[float]] = {}
    for arm in (base, *rungs.complete_arms):
        by_size = [_compute(ledger, ledger.tasks[label], arm) for label in labels]
        per_seed = _losses(ledger, rungs, arm)
        if None not in by_size and per_seed.shape[1]:
            computes[arm] = [(value or 0.0) / rungs.sizes[0].compute for value in by_size]
            losses[arm] = per_seed
    if left_out is None:
        notes.append(
            f"No fit of loss against compute: its {PARAMETERS} parameters and a size to predict need "
            f"{PARAMETERS + 1} sizes, and there are {len(scales)}."
        )
    resampled = _Resampled(losses, computes, left_out)
    rows = []
    for name in (arm.name for arm in arms):
        arm_fit = resampled.fits.get(name)
        if name == base:
            rows.append(ArmLadder(base, "base", [], None, arm_fit, []))
        elif name in rungs.complete_arms:
            differences = [outcomes[label][name].difference for label in labels]
            slope, predictions = trends[task, name], resampled.predictions(name, base, labels)
            rows.append(ArmLadder(name, verdict(differences, slope), differences, slope, arm_fit, predictions))
        else:
            notes.append(f"{name} has no results at every size.")
    return TaskLadder(task, at_smallest.metric, at_smallest.maximize, rungs.sizes, rows, notes)


class _Resampled:
    """Fits of the mean losses of every arm, and of means over seeds that are drawn with replacement.

    The same seeds are drawn for all arms.

    Args:
        losses: The losses of each arm [sizes, seeds].
        computes: The compute of each arm at each size, over the compute of the base's smallest size.
        left_out: How many of the largest sizes the fits leave out; None makes no fits.
    """

    def __init__(self, losses: Mapping[str, Array], computes: Mapping[str, list[float]], left_out: int | None) -> None:
        self.fits: dict[str, Fit] = {}
        self.left_out = left_out
        self._computes = computes
        self._means: dict[str, Array] = {}
        self._parameters: dict[str, tuple[Array, Array, Array]] = {}
        if left_out is None or not losses:
            return
        seeds = min(by_seed.shape[1] for by_seed in losses.values())
        # The first resample is the seeds themselves.
        draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
        draws = np.concatenate([np.arange(seeds)[None], draws])
        for arm, by_seed in losses.items():
            means = np.array([by_seed[:, draw].mean(1) for draw in draws])
            kept = means.shape[1] - left_out
            a, b, c = fit(computes[arm][:kept], means[:, :kept])
            self._means[arm], self._parameters[arm] = means, (a, b, c)
            low, high = ([float(np.quantile(part[1:], q)) for part in (a, b, c)] for q in (0.025, 0.975))
            self.fits[arm] = Fit(float(a[0]), float(b[0]), float(c[0]), tuple(low), tuple(high))  # type: ignore[arg-type]

    def predictions(self, arm: str, base: str, labels: Sequence[str]) -> list[Prediction]:
        """Returns the prediction of the fits at each size that they left out; [] without fits."""
        if arm not in self.fits or base not in self.fits or not self.left_out:
            return []
        predictions = []
        for size in range(len(labels) - self.left_out, len(labels)):
            predicted = self._at(arm, size) - self._at(base, size)
            measured = self._means[arm][:, size] - self._means[base][:, size]
            miss = _interval(predicted - measured)
            predictions.append(
                Prediction(labels[size], _interval(predicted), _interval(measured), miss, miss.low <= 0.0 <= miss.high)
            )
        return predictions

    def _at(self, arm: str, size: int) -> Array:
        """The loss of each resample's fit at a size: [resamples]."""
        a, b, c = self._parameters[arm]
        losses: Array = a + b * self._computes[arm][size] ** -c
        return losses


def _interval(resamples: Array) -> Interval:
    """The value of the first resample, which is the seeds themselves, with the 95% interval of the other resamples."""
    low, high = np.quantile(resamples[1:], (0.025, 0.975))
    return Interval(float(resamples[0]), float(low), float(high), len(resamples) - 1)


def _compute(ledger: RecordedScores, task: RecordedTask, arm: str) -> float | None:
    """The operations of matrix products that an arm's training takes; None if no trial of the arm is done."""
    for trial in ledger.of(arm, task.name):
        flops = ledger.finals.get(trial.key, {}).get(("cost", "flops_per_token"), {})
        if flops:
            train = trial.config["train"]
            tokens = train["steps"] * train["batch_size"] * task.length
            return BACKWARD * float(next(iter(flops.values()))) * float(tokens)
    return None


def _losses(ledger: RecordedScores, rungs: _Rungs, arm: str) -> Array:
    """The test losses [sizes, seeds] of the runs that seeds chose, for the seeds that finished at every size."""
    rows = []
    for size, scores in zip(rungs.sizes, rungs.scores, strict=True):
        runs = ledger.runs(ledger.of(arm, size.label), "loss")
        chosen = {seed: scores.choice(arm, seed) for seed in scores.results[arm]}
        rows.append({seed: math.nan if number is None else runs[number][seed].test for seed, number in chosen.items()})
    seeds = [seed for seed in rows[0] if all(math.isfinite(row.get(seed, math.nan)) for row in rows)]
    return np.array([[row[seed] for seed in seeds] for row in rows])
