"""The curves of a study as lines: the runs that stand for an arm, their smoothing, and their mean with its band."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from deltalab.store import Arm, CurvePoint, Store, Study, TrialRow
from deltalab.store.models import RunState, Stage
from deltalab.study.answers.answer import SPLIT
from deltalab.study.answers.ladder_trends import BACKWARD
from deltalab.study.answers.recorded_scores import Measured
from deltalab.study.statistics.intervals import t_quantile

AXES = {
    "step": "step",
    "tokens": "tokens of training",
    "seconds": "seconds of training",
    "flops": "operations of training",
}
LABEL = re.compile(r"(\d+)(?:x(\d+))?")
"""A label of evaluations that states a length, and for multi-query recall the number of pairs."""


@dataclass(frozen=True)
class Chosen:
    """A run that is drawn. state: "diverged" runs have no share in means."""

    arm: str
    trial: TrialRow
    seed: int
    state: RunState


class Task:
    """What a study has of one task at one stage.

    runs: of each arm, the run of each seed that stands for the arm. While the study confirms, that is the run which the
    seed chose on validation, as in the report. While it tunes, the runs are those of the candidate with the best mean.
    """

    def __init__(self, store: Store, study: Study, arms: Sequence[Arm], task: str, stage: Stage) -> None:
        self.name, self.about = task, study.provenance["tasks"][task]
        self._ledger = Measured(store, study.id, store.trials(study.id), study.spec)
        self._maximize, self._metric = self.about["maximize"], self.about["metric"]
        self.trials = {arm.name: self._ledger.of(arm.name, task, stage) for arm in arms}
        choose = self._by_seed if stage == "confirm" else self._best
        self.runs = {arm: choose(trials) for arm, trials in self.trials.items()}
        self.scores = {arm: self._mean(runs, SPLIT[stage]) for arm, runs in self.runs.items()}

    def best(self, base: str | None, most: int) -> list[str]:
        """The base and the `most` arms with the best mean score, in the order of the study; those without one last."""
        run = [arm for arm, runs in self.runs.items() if runs and arm != base]
        sign = -1 if self._maximize else 1
        ranked = sorted(run, key=lambda arm: (math.isnan(self.scores[arm]), sign * self.scores[arm]))
        return [arm for arm in self.scores if arm == base or arm in ranked[:most]]

    def candidates(self, arms: Collection[str]) -> list[Chosen]:
        """Every run of every candidate of some arms."""
        return [
            Chosen(arm, trial, seed, state)
            for arm in arms
            for trial in self.trials[arm]
            for seed, state in trial.runs.items()
        ]

    def rate(self, trial: TrialRow, axis: str) -> float:
        """What a step of a trial's training counts on an axis; NaN where the ledger does not say."""
        if axis == "step":
            return 1.0
        length, batch = length_of(self.about), trial.config.get("train", {}).get("batch_size")
        if length is None or batch is None:
            return math.nan
        if axis == "tokens":
            return float(batch * length)
        if axis == "seconds":
            return batch * length / trial.tokens_per_second if trial.tokens_per_second else math.nan
        flops = self._ledger.finals.get(trial.key, {}).get(("cost", "flops_per_token"), {})
        per_token: float = next(iter(flops.values()), math.nan)
        return BACKWARD * per_token * float(batch * length)

    def _score(self, trial: TrialRow, split: str, seed: int) -> float:
        return self._ledger.finals.get(trial.key, {}).get((split, self._metric), {}).get(seed, math.nan)

    def _mean(self, runs: Sequence[Chosen], split: str) -> float:
        values = [self._score(run.trial, split, run.seed) for run in runs if run.state == "done"]
        return math.fsum(values) / len(values) if values else math.nan

    def _by_seed(self, trials: Sequence[TrialRow]) -> list[Chosen]:
        best: dict[int, tuple[float, Chosen]] = {}
        for trial in trials:
            for seed, state in trial.runs.items():
                score = self._score(trial, "validation", seed) * (1 if self._maximize else -1)
                score = -math.inf if math.isnan(score) or state == "diverged" else score
                if seed not in best or score > best[seed][0]:
                    best[seed] = score, Chosen(trial.arm, trial, seed, state)
        return [best[seed][1] for seed in sorted(best)]

    def _best(self, trials: Sequence[TrialRow]) -> list[Chosen]:
        found: tuple[float, TrialRow] | None = None
        for trial in trials:
            scores = [self._score(trial, "validation", seed) for seed in trial.runs]
            mean = math.fsum(scores) / len(scores) * (1 if self._maximize else -1) if scores else -math.inf
            mean = -math.inf if math.isnan(mean) else mean
            if found is None or mean > found[0]:
                found = mean, trial
        return [Chosen(found[1].arm, found[1], seed, state) for seed, state in found[1].runs.items()] if found else []


def length_of(about: Mapping[str, Any]) -> int | None:
    """The length that a task trains at; None where its record does not say."""
    parameters = about.get("parameters", {})
    if "length_range" in parameters:  # the last of the total length is the answer, which is no input
        return int(parameters["length_range"][1]) - 1
    found = about.get("length", parameters.get("length"))
    return None if found is None else int(found)


def frame(
    task: Task, runs: Sequence[Chosen], points: Sequence[CurvePoint], axis: str, smoothing: float
) -> pd.DataFrame:
    """The points of some runs: arm, trial, seed, state, step, x on an axis, value as recorded and `smooth`.

    smooth: the exponential moving average m_i = (sum_j s^(i-j) v_j) / (sum_j s^(i-j)) over j <= i, of each run.
    Points whose x the ledger does not know are left out.
    """
    known = {(run.arm, run.trial.key, run.seed): run for run in runs}
    rates = {run.trial.key: task.rate(run.trial, axis) for run in runs}
    rows = [
        (point.arm, point.trial, point.seed, known[at].state, point.step, point.value)
        for point in points
        if (at := (point.arm, point.trial, point.seed)) in known
    ]
    found = pd.DataFrame(rows, columns=["arm", "trial", "seed", "state", "step", "value"])
    found["x"] = found["step"] * found["trial"].map(rates).astype(float)
    found = found.dropna(subset="x")
    found["smooth"] = found["value"]
    if smoothing and len(found):
        of_run = found.groupby(["arm", "trial", "seed"], sort=False)["value"]
        found["smooth"] = of_run.ewm(alpha=1 - smoothing).mean().reset_index(level=[0, 1, 2], drop=True)
    return found


def means(points: pd.DataFrame, by: Sequence[str], bounds: Sequence[float] | None) -> pd.DataFrame:
    """The mean of the runs that finished, and its 95% t interval, at each value of `by`.

    `value` is the mean as recorded; smooth, low and high are of the smoothed runs; n of them. low and high are NaN for
    one run, and are cut off at the bounds of the metric.
    """
    done = points[points["state"] == "done"]
    found = done.groupby(list(by), sort=False, as_index=False).agg(
        x=("x", "mean"), value=("value", "mean"), smooth=("smooth", "mean"), sd=("smooth", "std"), n=("smooth", "count")
    )
    several = found["n"] > 1
    margin = np.full(len(found), np.nan)
    n = found.loc[several, "n"].to_numpy()
    margin[several] = t_quantile(n) * found.loc[several, "sd"] / np.sqrt(n)
    found["low"], found["high"] = found["smooth"] - margin, found["smooth"] + margin
    if bounds:
        found["low"], found["high"] = found["low"].clip(lower=bounds[0]), found["high"].clip(upper=bounds[1])
    return found.drop(columns="sd")


def lengths(metric: str, names: Collection[str]) -> dict[str, tuple[int, int | None]]:
    """The names among `names` of a metric at a length, METRIC@LENGTH or METRIC@LENGTHxPAIRS, with the two numbers.

    >>> lengths("accuracy", ["accuracy", "accuracy@128", "accuracy@64x8", "loss@64", "accuracy@3-40"])
    {'accuracy@128': (128, None), 'accuracy@64x8': (64, 8)}
    """
    found = {}
    for name in names:
        own, _, label = name.partition("@")
        if own == metric.partition("@")[0] and (match := LABEL.fullmatch(label)):
            found[name] = int(match[1]), int(match[2]) if match[2] else None
    return found
