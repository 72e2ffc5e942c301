"""Tests how each arm's difference to the base changes with model size, and whether a fit predicts the difference.

Arm j has with seed s the difference d_jsi to the base at size i, whose training takes compute C_i. With
x_i = log10 C_i, the trend is

    slope_js = sum_i (x_i - mean x) d_jsi / sum_i (x_i - mean x)^2

Under "no trend", a seed's slope is as likely to have the opposite sign. `joint_test.compare` tests the slopes of all
arms together, by flips of whole seeds. The test is exact if the noise of a difference is symmetric at every size: the
slopes of a difference that is the same at all sizes are then pure noise.

The fit L = a + b C^-c with a, b >= 0 describes the mean loss L of an arm by its compute C, by least squares (Kaplan et
al. 2020, arXiv:2001.08361; the offset a as in Henighan et al. 2020, arXiv:2010.14701). Its intervals come
from fits to draws of the means, by `intervals.student_draws`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalab.errors import InputError
from deltalab.statistics.intervals import LEVEL, Interval, student_draws
from deltalab.statistics.joint_test import Difference, Outcome, compare
from deltalab.statistics.pairs import Contrast, Pairs
from deltalab.statistics.seed_choice import Scores
from deltalab.store import Arm
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.specs.recorded_study import RecordedTask
from deltalab.study.specs.sections.ladder_sizes import PARAMETERS, learning_rates_text

Array = NDArray[np.float64]
Verdict = Literal["holds", "shrinks", "reverses", "not decidable"]

SEEDS = 2
"""The fewest seeds that give a fit its intervals."""
EXPONENTS = np.geomspace(0.02, 2.0, 30)
"""The values of c that a fit tries first."""
HALVINGS = 10
"""How often a fit halves the range of c around the best of `EXPONENTS`, to 0.03% of c."""


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
        low: The lower ends of the 95% intervals of a, b and c.
        high: The upper ends of the same intervals.
    """

    a: float
    b: float
    c: float
    low: tuple[float, float, float]
    high: tuple[float, float, float]

    def at(self, compute: float) -> float:
        """Returns the fitted loss at a compute, in units of the compute of the base's smallest size."""
        return self.a + self.b * math.pow(compute, -self.c)


@dataclass(frozen=True)
class Prediction:
    """An arm's difference in loss at a size that the fits left out, with 95% intervals over seeds.

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
        verdict: How the difference changes with size, in a word; see `verdict`. The arm that the others are compared
            with has "base", or "reference" if it is another.
        differences: The difference to the arm that the others are compared with at each size; intervals hold jointly
            over sizes and arms.
        slope: The change of the difference per tenfold compute; None for the arm that the others are compared with.
        fit: The fit of the loss; None with too few sizes.
        predictions: One for each size that the fit left out.
    """

    arm: str
    verdict: Verdict | Literal["base", "reference"]
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
        reference: What sentences call the arm that the others are compared with.
    """

    task: str
    metric: str
    maximize: bool
    sizes: list[Size]
    arms: list[ArmLadder]
    notes: list[str]
    reference: str = "the base"


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
    """Fits loss = a + b C^-c by least squares, with a and b at least 0 and c within `EXPONENTS`.

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
    errors = np.array([_fit_given(x, y, np.asarray(c))[2] for c in EXPONENTS])
    near = np.log(EXPONENTS)
    best = errors.argmin(0)
    low, high = near[(best - 1).clip(0)], near[(best + 1).clip(max=len(near) - 1)]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        left, right = (_fit_given(x, y, np.exp(middle + step))[2] for step in (-1e-5, 1e-5))
        low, high = np.where(left > right, middle, low), np.where(left > right, high, middle)
    c = np.exp((low + high) / 2)
    a, b, _ = _fit_given(x, y, c)
    return a, b, c


def _fit_given(x: Array, y: Array, c: Array) -> tuple[Array, Array, Array]:
    """Fits a and b to the losses y [..., sizes], given c [...], and returns them with the sum of squared errors."""
    power = x ** -c[..., None]
    mean, mean_power = y.mean(-1), power.mean(-1)
    centred = power - mean_power[..., None]
    b = np.maximum((y * centred).sum(-1) / (centred**2).sum(-1), 0.0)
    a = mean - b * mean_power
    b_without_offset = np.maximum((y * power).sum(-1) / (power**2).sum(-1), 0.0)
    a, b = np.where(a < 0, 0.0, a), np.where(a < 0, b_without_offset, b)
    return a, b, ((y - a[..., None] - b[..., None] * power) ** 2).sum(-1)


def fit_with_intervals(compute: ArrayLike, losses: ArrayLike) -> Fit:
    """Returns the fit of an arm's mean losses, with intervals.

    Args:
        compute: The compute at each size [sizes], over that of the base's smallest size.
        losses: The losses of each seed [sizes, seeds].
    """
    by_seed = np.asarray(losses, dtype=float)
    a, b, c = (_interval(drawn, by_seed.shape[-1]) for drawn in fit(compute, student_draws(by_seed)))
    return Fit(a.mean, b.mean, c.mean, (a.low, b.low, c.low), (a.high, b.high, c.high))


def predict(labels: Sequence[str], compute: ArrayLike, losses: ArrayLike, left_out: int) -> list[Prediction]:
    """Predicts the difference between an arm and the base at the largest sizes from fits of the others.

    Args:
        labels: The name of the task at each size, the smallest size first.
        compute: The compute of the arm and of the base at each size [2, sizes], in any unit.
        losses: The losses of the arm and of the base with each seed [2, sizes, seeds].
        left_out: How many of the largest sizes are predicted.
    """
    x, by_seed = np.asarray(compute, dtype=float), np.asarray(losses, dtype=float)
    means, seeds, kept = student_draws(by_seed), by_seed.shape[-1], len(labels) - left_out
    fits = [fit(x[i, :kept], means[:, i, :kept]) for i in range(2)]
    predictions = []
    for size in range(kept, len(labels)):
        of_arm, of_base = (a + b * x[i, size] ** -c for i, (a, b, c) in enumerate(fits))
        predicted, measured = of_arm - of_base, means[:, 0, size] - means[:, 1, size]
        miss = _interval(predicted - measured, seeds)
        agrees = miss.low <= 0.0 <= miss.high
        of_both = _interval(predicted, seeds), _interval(measured, seeds)
        predictions.append(Prediction(labels[size], *of_both, miss, agrees))
    return predictions


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
    losses: dict[str, _Losses] = {}
    if left_out is None:
        notes.append(
            f"No fit of loss against compute: its {PARAMETERS} parameters and a size to predict need "
            f"{PARAMETERS + 1} sizes, and there are {len(scales)}."
        )
    else:
        for arm in (base, *rungs.complete_arms):
            by_size = [_compute(ledger, ledger.tasks[label], arm) for label in labels]
            by_seed = _losses(ledger, rungs, arm)
            if None in by_size or len(by_seed) < SEEDS:
                notes.append(f"No fit of {arm}: fewer than {SEEDS} of its seeds finished at every size.")
            else:
                compute = [(value or 0.0) / rungs.sizes[0].compute for value in by_size]
                losses[arm] = _Losses(compute, by_seed)
    rows = []
    own_base = next(arm.name for arm in arms if arm.is_base)
    for name in (arm.name for arm in arms):
        arm_fit = losses[name].fit(left_out) if name in losses and left_out is not None else None
        if name == base:
            rows.append(ArmLadder(base, "base" if base == own_base else "reference", [], None, arm_fit, []))
        elif name in rungs.complete_arms:
            differences = [outcomes[label][name].difference for label in labels]
            slope = trends[task, name]
            predictions = (
                losses[name].predictions(losses[base], labels, left_out or 0) if {name, base} <= {*losses} else []
            )
            rows.append(ArmLadder(name, verdict(differences, slope), differences, slope, arm_fit, predictions))
        else:
            notes.append(f"{name} has no results at every size.")
    called = "the base" if base == own_base else base
    return TaskLadder(task, at_smallest.metric, at_smallest.maximize, rungs.sizes, rows, notes, called)


@dataclass(frozen=True)
class _Losses:
    """The losses of an arm.

    Attributes:
        compute: The compute at each size [sizes], over that of the base's smallest size.
        by_seed: The losses [sizes] of each seed that finished at every size.
    """

    compute: list[float]
    by_seed: dict[int, Array]

    def of(self, seeds: Iterable[int]) -> Array:
        """The losses of the given seeds [sizes, seeds]."""
        return np.array([self.by_seed[seed] for seed in seeds]).T

    def fit(self, left_out: int) -> Fit:
        """The fit to all but the largest sizes."""
        kept = len(self.compute) - left_out
        return fit_with_intervals(self.compute[:kept], self.of(self.by_seed)[:kept])

    def predictions(self, base: "_Losses", labels: Sequence[str], left_out: int) -> list[Prediction]:
        """The predictions from the seeds that this arm and the base share; [] if the seeds are too few."""
        seeds = [seed for seed in base.by_seed if seed in self.by_seed]
        if len(seeds) < SEEDS:
            return []
        return predict(labels, [self.compute, base.compute], [self.of(seeds), base.of(seeds)], left_out)


def _interval(drawn: Array, seeds: int) -> Interval:
    """The value of the measured means, which stands first, with the interval of the values of the draws."""
    low, high = np.quantile(drawn[1:], ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(float(drawn[0]), float(low), float(high), seeds)


def _compute(ledger: RecordedScores, task: RecordedTask, arm: str) -> float | None:
    """The operations of matrix products that an arm's training takes; None if no trial of the arm is done."""
    for trial in ledger.of(arm, task.name):
        of_step = ledger.step_compute(trial, task)
        if math.isfinite(of_step):
            return float(trial.config["train"]["steps"]) * of_step
    return None


def _losses(ledger: RecordedScores, rungs: _Rungs, arm: str) -> dict[int, Array]:
    """Returns by seed the test loss at each size, [sizes], of the run that the seed's choice weighs most.

    Seeds without a finished run at every size are left out.
    """
    rows = []
    for size, scores in zip(rungs.sizes, rungs.scores, strict=True):
        runs = ledger.runs(ledger.of(arm, size.label), "loss")
        chosen = {seed: scores.choice(arm, seed) for seed in scores.results[arm]}
        rows.append({seed: math.nan if number is None else runs[number][seed].test for seed, number in chosen.items()})
    by_seed = {seed: np.array([row.get(seed, math.nan) for row in rows]) for seed in rows[0]}
    return {seed: losses for seed, losses in by_seed.items() if np.isfinite(losses).all()}
