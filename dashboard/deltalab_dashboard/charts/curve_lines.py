"""Computes the points of learning curves.

The module chooses the runs that stand for an arm, smooths the curve of each run, and averages the runs.
"""

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pandas as pd

from deltalab.statistics.intervals import t_quantile
from deltalab.store import Arm, CurvePoint, Store, Study, TrialRow
from deltalab.store.models import RunState, Stage
from deltalab.study.answers.recorded_scores import RecordedScores
from deltalab.study.answers.rows import SPLIT

AXES = {
    "step": "step",
    "tokens": "tokens of training",
    "seconds": "seconds of training",
    "flops": "operations of training",
}
"""The horizontal axes over which curves can be drawn: name -> title."""
LABEL = re.compile(r"(\d+)(?:x(\d+))?")
"""Matches the label of an evaluation on examples of one length: LENGTH, or LENGTHxPAIRS in multi-query recall."""


@dataclass(frozen=True)
class DrawnRun:
    """A run whose curve is drawn. A mean over runs leaves out the runs that diverged."""

    arm: str
    trial: TrialRow
    seed: int
    state: RunState


class Curves:
    """The runs of a study on one task at one stage.

    Attributes:
        task: The task.
        trials: The trials of each arm: name of the arm -> trials.
        runs: The runs that stand for each arm: name of the arm -> a run for each seed. At the stage `confirm`, a seed's
            run is the one that the seed chose on validation, as in the report. At the stage `tune`, the runs are those
            of the candidate with the best mean.
        means: The mean score of each arm's `runs`: name of the arm -> mean over the runs that finished, or NaN if no
            run finished.
    """

    def __init__(self, store: Store, study: Study, arms: Sequence[Arm], task: str, stage: Stage) -> None:
        self._ledger = RecordedScores(store, study, store.trials(study.id))
        self.task = self._ledger.tasks[task]
        self.trials = {arm.name: self._ledger.of(arm.name, task, stage) for arm in arms}
        self._scores = self._ledger.scores(self.task, arms)
        choose = self._by_seed if stage == "confirm" else self._best
        self.runs = {arm: choose(arm) for arm in self.trials}
        self.means = {arm: self._mean(runs, SPLIT[stage]) for arm, runs in self.runs.items()}

    def best(self, base: str | None, most: int) -> list[str]:
        """Returns the base and the `most` other arms with the best mean scores, in the order of the study."""
        trained = [arm for arm, runs in self.runs.items() if runs and arm != base]
        ranked = sorted(trained, key=lambda arm: (math.isnan(self.means[arm]), -self.task.sign * self.means[arm]))
        return [arm for arm in self.means if arm == base or arm in ranked[:most]]

    def candidates(self, arms: Collection[str]) -> list[DrawnRun]:
        """Returns every run of every candidate of the given arms."""
        return [
            DrawnRun(arm, trial, seed, state)
            for arm in arms
            for trial in self.trials[arm]
            for seed, state in trial.runs.items()
        ]

    def rate(self, trial: TrialRow, axis: str) -> float:
        """Returns how many units of an axis, a key of `AXES`, one training step of a trial takes.

        If the ledger does not hold the necessary figures, NaN is returned.
        """
        if axis == "step":
            return 1.0
        if axis == "flops":
            return self._ledger.step_compute(trial, self.task)
        batch = trial.config.get("train", {}).get("batch_size")
        if self.task.length is None or batch is None:
            return math.nan
        tokens = float(batch * self.task.length)
        if axis == "tokens":
            return tokens
        return tokens / trial.tokens_per_second if trial.tokens_per_second else math.nan

    def _mean(self, runs: Sequence[DrawnRun], split: str) -> float:
        """Returns the mean score of the runs that finished, or NaN if no run finished."""
        finals = self._ledger.finals
        values = [
            finals.get(run.trial.key, {}).get((split, self.task.metric), {}).get(run.seed, math.nan)
            for run in runs
            if run.state == "done"
        ]
        return fmean(values) if values else math.nan

    def _by_seed(self, arm: str) -> list[DrawnRun]:
        """Returns the run that each seed chose, or the seed's first run if none of its runs finished."""
        runs: dict[int, DrawnRun] = {}
        for trial in self.trials[arm]:
            for seed, state in trial.runs.items():
                if seed not in runs or trial.number == self._scores.choice(arm, seed):
                    runs[seed] = DrawnRun(arm, trial, seed, state)
        return [runs[seed] for seed in sorted(runs)]

    def _best(self, arm: str) -> list[DrawnRun]:
        """Returns the runs of the best candidate, or of the first candidate if no candidate finished all its runs."""
        trials = self.trials[arm]
        best = self._ledger.best_on_validation(trials, self.task) or next(iter(trials), None)
        return [DrawnRun(arm, best, seed, state) for seed, state in best.runs.items()] if best else []


def curve_points(
    curves: Curves, runs: Sequence[DrawnRun], points: Sequence[CurvePoint], axis: str, smoothing: float
) -> pd.DataFrame:
    """Places the points of the given runs on an axis, and smooths the curve of each run.

    The smoothed value is the exponential moving average m_i = (sum_j s^(i-j) v_j) / (sum_j s^(i-j)) over j <= i.

    Args:
        curves: The runs of the task.
        runs: The runs to draw.
        points: Recorded points. Points of runs that are not in `runs` are left out.
        axis: A key of `AXES`.
        smoothing: The factor s, from 0 to below 1. A point has s times the weight of the next point.

    Returns:
        A row for each point, with the columns `arm`, `trial`, `seed`, `state`, `step`, `value`, `x` and `smooth`.
        `value` is as recorded, `x` is the place on the axis, and `smooth` is the smoothed value. Points whose `x` is
        not known are left out.
    """
    known = {(run.arm, run.trial.key, run.seed): run for run in runs}
    rates = {run.trial.key: curves.rate(run.trial, axis) for run in runs}
    rows = [
        (point.arm, point.trial, point.seed, known[at].state, point.step, point.value)
        for point in points
        if (at := (point.arm, point.trial, point.seed)) in known
    ]
    frame = pd.DataFrame(rows, columns=["arm", "trial", "seed", "state", "step", "value"])
    frame["x"] = frame["step"] * frame["trial"].map(rates).astype(float)
    frame = frame.dropna(subset="x")
    frame["smooth"] = frame["value"]
    if smoothing and len(frame):
        by_run = frame.groupby(["arm", "trial", "seed"], sort=False)["value"]
        frame["smooth"] = by_run.ewm(alpha=1 - smoothing).mean().reset_index(level=[0, 1, 2], drop=True)
    return frame


def mean_points(points: pd.DataFrame, by: Sequence[str], bounds: Sequence[float] | None) -> pd.DataFrame:
    """Averages the points of the runs that finished, and gives each mean the 95% t interval of `mean_interval`.

    The means of all groups of points are computed at once.

    Args:
        points: Points as `curve_points` returns them.
        by: The columns to group by. Points with the same values in these columns are averaged.
        bounds: The lowest and the highest possible value of the metric, at which intervals are cut off. None if the
            metric has no bounds.

    Returns:
        A row for each mean. Its columns are those in `by`; `x`; `value`, the mean of the recorded values; `smooth`, the
        mean of the smoothed values; `low` and `high`, the interval of `smooth`; and `n`, the number of runs. If `n` is
        1, `low` and `high` are NaN.
    """
    done = points[points["state"] == "done"]
    means = done.groupby(list(by), sort=False, as_index=False).agg(
        x=("x", "mean"), value=("value", "mean"), smooth=("smooth", "mean"), sd=("smooth", "std"), n=("smooth", "count")
    )
    several = means["n"] > 1
    margin = np.full(len(means), np.nan)
    n = means.loc[several, "n"].to_numpy()
    margin[several] = t_quantile(n) * means.loc[several, "sd"] / np.sqrt(n)
    means["low"], means["high"] = means["smooth"] - margin, means["smooth"] + margin
    if bounds:
        means["low"], means["high"] = means["low"].clip(lower=bounds[0]), means["high"].clip(upper=bounds[1])
    return means.drop(columns="sd")


def lengths(metric: str, names: Collection[str]) -> dict[str, tuple[int, int | None]]:
    """Finds the names under which a metric was measured at single lengths: METRIC@LENGTH or METRIC@LENGTHxPAIRS.

    Returns each name with its length, and with its number of pairs or None.

    Args:
        metric: The name of the metric. A length in it is ignored.
        names: The names of all metrics that were measured.

    Examples:
        >>> lengths("accuracy", ["accuracy", "accuracy@128", "accuracy@64x8", "loss@64", "accuracy@3-40"])
        {'accuracy@128': (128, None), 'accuracy@64x8': (64, 8)}
    """
    length_of = {}
    for name in names:
        quantity, _, label = name.partition("@")
        if quantity == metric.partition("@")[0] and (match := LABEL.fullmatch(label)):
            length_of[name] = int(match[1]), int(match[2]) if match[2] else None
    return length_of
