"""Tests whether a study keeps its promise: at most 5% of studies whose arms are all alike find a difference.

In an A/A study every arm has runs of one and the same method, so that each verdict is false. The runs are drawn from
the study's runs in the ledger, or the base is trained on many seeds and its runs are split into arms. An A/A study
handles its runs as a study does: each seed chooses its candidate on validation, and the arms are tested in the study's
looks and family.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from deltalab import progress
from deltalab.errors import InputError
from deltalab.statistics.intervals import share_interval
from deltalab.statistics.joint_test import ALPHA, Look, smallest_p
from deltalab.statistics.seed_choice import Run, Scores, outcomes
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import scores_by_task
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import run_study
from deltalab.study.running.settings import RunSettings
from deltalab.study.specs.recorded_study import RecordedSpec, recorded_tasks

Array = NDArray[np.float64]

TOLD = 100
"""Simulated studies between two lines of progress for programs."""


@dataclass(frozen=True)
class Calibration:
    """The error that simulated A/A studies, whose arms all equal the base, show for one family of arms.

    Attributes:
        tasks: The tasks whose arms are tested together.
        arms: How many arms there are beside the base.
        looks: How many seeds each look has.
        seeds_of_base: How many seeds the base has if they are more than those of an arm; None if they are not.
        pool: How many seeds there are to draw the seeds of A/A studies from.
        studies: How many A/A studies there were.
        wrong: The share of A/A studies that found a difference, which is a false verdict.
        low: The lower end of the exact 95% interval of `wrong`.
        high: The upper end of the exact 95% interval of `wrong`.
        coverage: The share of A/A studies in which every interval of a difference contains 0.
        says: A sentence that judges whether the promise is kept.
    """

    tasks: list[str]
    arms: int
    looks: list[int]
    seeds_of_base: int | None
    pool: int
    studies: int
    wrong: float
    low: float
    high: float
    coverage: float
    says: str

    def __str__(self) -> str:
        """The calibration in lines of text."""
        arms = "1 arm" if self.arms == 1 else f"{self.arms} arms"
        seeds = " to ".join(map(str, dict.fromkeys((self.looks[0], self.looks[-1])))) + " seeds"
        if self.seeds_of_base is not None:
            seeds += f", and {self.seeds_of_base} of the base"
        return (
            f"{', '.join(self.tasks)}: {self.studies} A/A studies, {arms} beside the base, {seeds}, "
            f"drawn from {self.pool}\n"
            f"  with a verdict, which is false: {self.wrong:.1%} [{self.low:.1%}, {self.high:.1%}]\n"
            f"  with 0 in all intervals: {self.coverage:.1%}\n"
            f"  {self.says}"
        )


def simulated(store: Store, study_id: int, *, repeats: int = 400, quiet: bool = True) -> list[Calibration]:
    """Simulates A/A studies from the runs of a study.

    Seeds are drawn with replacement from the seeds of all arms. From the scores of a seed's candidates, the means over
    the seeds of its arm are subtracted, and the base's means are added.

    Args:
        store: The ledger.
        study_id: The study's id in the ledger.
        repeats: How many A/A studies to simulate.
        quiet: Whether to draw no progress bar.

    Returns:
        A calibration for each family: for each task, or one for all tasks if they are one family.

    Raises:
        InputError: The ledger has too few runs to draw from.
    """
    study = store.study(study_id)
    scores = scores_by_task(store, study)
    pools = {}
    for task, recorded in recorded_tasks(study).items():
        pool = residuals(scores[task], recorded.bounds)
        if len(pool) < 2:
            raise InputError(f"study '{study.address}' has too few runs on task '{task}' to draw from")
        pools[task] = pool
    arms = sum(not arm.is_base for arm in store.arms(study_id))
    return _calibrated(pools, scores, arms, RecordedSpec(study.spec).looks, study.spec, repeats, quiet, real=False)


def real(
    plan: Plan,
    *,
    db: str | None = None,
    repeats: int = 400,
    quiet: bool = True,
) -> list[Calibration]:
    """Trains the base of a study on as many seeds as all its arms take, and splits them into arms at random.

    The runs go to the ledger as a separate study, so that they are trained only once. If the study is a search, nothing
    is searched: the base is trained as the study's file states it.

    Args:
        plan: The study.
        db: The ledger; ./deltalab.db if None.
        repeats: How many A/A studies to split the runs into.
        quiet: Whether nothing is printed.

    Returns:
        A calibration for each family.

    Raises:
        InputError: A run of the base failed.
    """
    spec, base = plan.spec, base_alone(plan)
    result = run_study(base, RunSettings(db=db, executor="inline", quiet=quiet, unchecked=True))
    with Store.open(db, create=False) as store:
        scores = scores_by_task(store, store.study(result.study_id))
    pools = {task: _runs_of(of_task, of_task.base) for task, of_task in scores.items()}
    wanted = _seeds_in_all(plan)
    for task, pool in pools.items():
        if len(pool) < wanted:
            raise InputError(f"{plan.study_file}: {wanted - len(pool)} of {wanted} runs on task '{task}' failed")
    recorded = spec.model_dump(mode="json")
    return _calibrated(pools, scores, len(plan.names) - 1, spec.looks, recorded, repeats, quiet, real=True)


def base_alone(plan: Plan) -> Plan:
    """Plans a study that trains only the base of a plan, on as many seeds as all arms of the plan have together."""
    alone: dict[str, Any] = {
        "name": f"{plan.spec.name}_calibration",
        "description": f"The base of {plan.spec.name} on many seeds, to be split into arms that are alike.",
        "ablate": (),
        "factorial": (),
        "arms": {},
        "search": None,
        "seeds": _seeds_in_all(plan),
    }
    base = make_plan(plan.spec.model_copy(update=alone), profile=plan.profile, study_file=plan.study_file)
    return replace(base, overrides=plan.overrides)


def _seeds_in_all(plan: Plan) -> int:
    """The seeds that all arms of a plan have together on a task."""
    return (len(plan.names) - 1) * plan.spec.looks[-1].seeds + plan.spec.trained_in_parts(is_base=True)[-1]


def residuals(scores: Scores, bounds: Sequence[float] | None = None) -> Array:
    """Returns the scores of every arm that tried all of the base's candidates, shifted to the means of the base.

    Args:
        scores: The scores of a study on one task.
        bounds: The bounds of the metric, at which the shifted scores are cut off; None if it has no bounds.

    Returns:
        (validation, test) by seed and candidate, [P, C, 2].
    """
    pool = []
    base = _runs_of(scores, scores.base)
    if len(base) < 2:
        return base
    for arm in scores.runs:
        runs = _runs_of(scores, arm)
        if len(runs) > 1 and runs.shape[1:] == base.shape[1:]:
            pool.append(runs - _means(runs) + _means(base))
    low, high = bounds or (-math.inf, math.inf)
    return np.clip(np.concatenate(pool), low, high)


def _runs_of(scores: Scores, arm: str) -> Array:
    """Returns an arm's (validation, test) by seed and candidate, [P, C, 2]. A run that did not finish has NaN."""
    numbers = [number for number, runs in scores.runs[scores.base].items() if runs]
    of_arm = scores.runs[arm]
    if any(number not in of_arm for number in numbers):
        return np.empty((0, 0, 2))
    none = Run(math.nan, math.nan)
    by_seed = [[of_arm[number].get(seed, none) for number in numbers] for seed in scores.seeds[arm]]
    pairs = [[(run.validation, run.test) for run in runs] for runs in by_seed]
    return np.array(pairs, dtype=float).reshape(len(pairs), len(numbers), 2)


def _means(runs: Array) -> Array:
    """Returns the means over seeds, [C, 2]. A candidate that no seed finished has NaN."""
    finished = np.isfinite(runs)
    sums, counts = np.where(finished, runs, 0.0).sum(0), finished.sum(0)
    means: Array = np.divide(sums, counts, out=np.full(sums.shape, math.nan), where=counts > 0)
    return means


def _calibrated(
    pools: Mapping[str, Array],
    like: Mapping[str, Scores],
    arms: int,
    looks: Sequence[Look],
    spec: Mapping[str, Any],
    repeats: int,
    quiet: bool,
    *,
    real: bool,
) -> list[Calibration]:
    """Simulates A/A studies of each family of the study `spec`, with the directions and chance levels of `like`."""
    if not arms:
        raise InputError("the study has no arm beside its base: there is nothing to compare")
    random = np.random.default_rng(0)
    console = Console(stderr=True)
    recorded = RecordedSpec(spec)
    seeds = [recorded.trained_in_parts(is_base=arm == 0)[-1] for arm in range(arms + 1)]
    size, block = sum(seeds), looks[0].seeds if recorded.seeds_of_base is not None else None
    calibrations = []
    for tasks in recorded.families(list(pools)):
        wrong = held = 0
        hidden = quiet or progress.is_json() or not console.is_terminal
        what = f"A/A studies, {', '.join(tasks)}"
        for number in track(range(repeats), what, console=console, disable=hidden):
            if progress.is_json() and not quiet and number % TOLD == 0:
                progress.advance(f"{what}: {number} of {repeats}", done=number, total=repeats)
            tables = []
            for task in tasks:
                pool = pools[task]
                drawn = random.permutation(len(pool))[:size] if real else random.integers(len(pool), size=size)
                by_arm = np.split(pool[drawn], np.cumsum(seeds)[:-1])
                tables.append(_study(by_arm, like[task], block))
            outcomes_of_all = [
                outcome for table in outcomes(tables, looks, intervals=False) for outcome in table.values()
            ]
            differences = [outcome.difference for outcome in outcomes_of_all]
            wrong += any(difference.p <= ALPHA for difference in differences)
            held += all(difference.low <= 0 <= difference.high for difference in differences)
        low, high = share_interval(wrong, repeats)
        calibrations.append(
            Calibration(
                tasks=tasks,
                arms=arms,
                looks=[look.seeds for look in looks],
                seeds_of_base=recorded.seeds_of_base,
                pool=min(len(pools[task]) for task in tasks),
                studies=repeats,
                wrong=wrong / repeats,
                low=low,
                high=high,
                coverage=held / repeats,
                says=_conclusion(low, looks),
            )
        )
    return calibrations


def _study(by_arm: Sequence[Array], like: Scores, block: int | None) -> Scores:
    """Makes the scores of an A/A study from the runs of its arms, each [seeds, C, 2], on the scale of `like`."""
    seeds = {str(arm): range(1, len(drawn) + 1) for arm, drawn in enumerate(by_arm)}
    runs = {
        arm: {number: {seed: Run(*drawn[seed - 1, number]) for seed in seeds[arm]} for number in range(drawn.shape[1])}
        for arm, drawn in zip(seeds, by_arm, strict=True)
    }
    return Scores("0", like.maximize, like.chance, runs, seeds, block=block)


def _conclusion(low: float, looks: Sequence[Look]) -> str:
    """Says whether the promise is broken. `low` is the lower end of the interval of the share of false verdicts."""
    seeds = looks[-1].seeds
    if smallest_p(seeds) > looks[-1].spent:
        return f"With {seeds} seeds the study cannot reach a verdict, so none can be false."
    promise = f"at most {ALPHA:.0%} of studies may find a difference where there is none"
    if low > ALPHA:
        return f"The promise is broken: {promise}, and at least {low:.1%} do."
    return f"No sign that the promise is broken: {promise}."
