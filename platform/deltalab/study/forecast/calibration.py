"""Whether a study keeps its promise: at most 5% of studies of arms that are alike find a difference.

An A/A study gives every arm the runs of one method, so that each verdict is false. Its runs are drawn from those that
the ledger has of the study, or are splits of runs that were trained for it. They go the way of a study's: each seed
chooses its candidate on validation, and the arms are tested in the study's looks and family.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import looks_of, results
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running.run import run_study
from deltalab.study.specs.ladder_sizes import families
from deltalab.study.statistics.intervals import share_interval
from deltalab.study.statistics.joint_test import ALPHA, Look, smallest_p
from deltalab.study.statistics.seed_choice import Run, Scores, outcomes

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """The A/A studies of one family of arms.

    tasks: those whose arms are tested together. arms: beside the base. looks: seeds at each look.
    pool: how many seeds the simulated ones are drawn from. wrong: the share of studies with a verdict; low, high: its
    exact 95% interval. coverage: the share of studies all of whose intervals hold 0.
    """

    tasks: list[str]
    arms: int
    looks: list[int]
    pool: int
    studies: int
    wrong: float
    low: float
    high: float
    coverage: float
    says: str

    def __str__(self) -> str:
        arms = "1 arm" if self.arms == 1 else f"{self.arms} arms"
        seeds = " to ".join(map(str, dict.fromkeys((self.looks[0], self.looks[-1]))))
        return (
            f"{', '.join(self.tasks)}: {self.studies} A/A studies, {arms} beside the base, {seeds} seeds, "
            f"drawn from {self.pool}\n"
            f"  with a verdict, which is false: {self.wrong:.1%} [{self.low:.1%}, {self.high:.1%}]\n"
            f"  with 0 in all intervals: {self.coverage:.1%}\n"
            f"  {self.says}"
        )


def simulated(store: Store, study_id: int, *, repeats: int = 400, quiet: bool = True) -> list[Calibration]:
    """A/A studies from a study's own runs, by task, or of all tasks where they are one family.

    A seed is drawn with replacement from those of all arms: the scores of its candidates, minus their means over the
    arm's seeds, plus the base's means.
    Raises `InputError` where the ledger has too few runs to draw from.
    """
    study = store.study(study_id)
    found = results(store, study_id)
    pools = {}
    for task, about in study.provenance["tasks"].items():
        pool = residuals(found[task], about.get("bounds"))
        if len(pool) < 2:
            raise InputError(f"study '{study.address}' has too few runs on task '{task}' to draw from")
        pools[task] = pool
    arms = sum(not arm.is_base for arm in store.arms(study_id))
    return _calibrated(pools, found, arms, looks_of(study.spec), study.spec, repeats, quiet, real=False)


def real(
    plan: Plan,
    *,
    db: str | None = None,
    repeats: int = 400,
    quiet: bool = True,
) -> list[Calibration]:
    """Trains the base of a study on as many seeds as all its arms take, and splits them into arms at random.

    The runs go to the ledger as a study of their own, so that they are trained once. A search is left out: its base is
    trained as written.
    """
    spec, base = plan.spec, base_alone(plan)
    result = run_study(base, db=db, executor="inline", quiet=quiet, unchecked=True)
    with Store.open(db, create=False) as store:
        found = results(store, result.study_id)
    pools = {task: _runs(scores, scores.base) for task, scores in found.items()}
    wanted = len(plan.names) * spec.looks[-1].seeds
    for task, pool in pools.items():
        if len(pool) < wanted:
            raise InputError(f"{plan.where}: {wanted - len(pool)} of {wanted} runs on task '{task}' failed")
    about = spec.model_dump(mode="json")
    return _calibrated(pools, found, len(plan.names) - 1, spec.looks, about, repeats, quiet, real=True)


def base_alone(plan: Plan) -> Plan:
    """The study of a plan's base, on a seed for every seed of every arm."""
    alone: dict[str, Any] = {
        "name": f"{plan.spec.name}_calibration",
        "description": f"The base of {plan.spec.name} on many seeds, to be split into arms that are alike.",
        "ablate": (),
        "factorial": (),
        "arms": {},
        "search": None,
        "seeds": len(plan.names) * plan.spec.looks[-1].seeds,
    }
    base = make_plan(plan.spec.model_copy(update=alone), profile=plan.profile, where=plan.where)
    return replace(base, overrides=plan.overrides)


def residuals(scores: Scores, bounds: Sequence[float] | None = None) -> Array:
    """The scores of whole seeds [P, C, 2] around the base's means: those of every arm that tried all its candidates."""
    pool = []
    base = _runs(scores, scores.base)
    if len(base) < 2:
        return base
    for arm in scores.runs:
        runs = _runs(scores, arm)
        if len(runs) > 1 and runs.shape[1:] == base.shape[1:]:
            pool.append(runs - _means(runs) + _means(base))
    low, high = bounds or (-math.inf, math.inf)
    return np.clip(np.concatenate(pool), low, high)


def _runs(scores: Scores, arm: str) -> Array:
    """An arm's (validation, test) by seed and candidate [P, C, 2]; NaN where a run did not finish."""
    numbers = [number for number, runs in scores.runs[scores.base].items() if runs]
    own = scores.runs[arm]
    if any(number not in own for number in numbers):
        return np.empty((0, 0, 2))
    none = Run(math.nan, math.nan)
    found = [[own[number].get(seed, none) for number in numbers] for seed in scores.seeds[arm]]
    pairs = [[(run.validation, run.test) for run in runs] for runs in found]
    return np.array(pairs, dtype=float).reshape(len(pairs), len(numbers), 2)


def _means(runs: Array) -> Array:
    """Means over seeds [C, 2]; NaN for a candidate that never finished."""
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
    """Simulates A/A studies of each family.

    like: a study's scores by task, for their direction and chance. spec: of the study as the ledger has it.
    """
    if not arms:
        raise InputError("the study has no arm beside its base: there is nothing to compare")
    random = np.random.default_rng(0)
    console = Console(stderr=True)
    shape = (arms + 1, looks[-1].seeds)
    found = []
    for tasks in families(spec, list(pools)):
        wrong = held = 0
        hidden = quiet or not console.is_terminal
        for _ in track(range(repeats), f"A/A studies, {', '.join(tasks)}", console=console, disable=hidden):
            tables = []
            for task in tasks:
                pool, size = pools[task], math.prod(shape)
                drawn = random.permutation(len(pool))[:size] if real else random.integers(len(pool), size=size)
                tables.append(_study(pool[drawn].reshape(*shape, *pool.shape[1:]), like[task]))
            outcomes_of_all = [
                outcome for table in outcomes(tables, looks, intervals=False) for outcome in table.values()
            ]
            differences = [outcome.difference for outcome in outcomes_of_all]
            wrong += any(difference.p <= ALPHA for difference in differences)
            held += all(difference.low <= 0 <= difference.high for difference in differences)
        low, high = share_interval(wrong, repeats)
        found.append(
            Calibration(
                tasks=tasks,
                arms=arms,
                looks=[look.seeds for look in looks],
                pool=min(len(pools[task]) for task in tasks),
                studies=repeats,
                wrong=wrong / repeats,
                low=low,
                high=high,
                coverage=held / repeats,
                says=_says(low, looks),
            )
        )
    return found


def _study(drawn: Array, like: Scores) -> Scores:
    """The scores of an A/A study with runs [arms, seeds, C, 2]."""
    seeds = range(1, drawn.shape[1] + 1)
    runs = {
        str(arm): {number: {seed: Run(*own[seed - 1][number]) for seed in seeds} for number in range(drawn.shape[2])}
        for arm, own in enumerate(drawn.tolist())
    }
    return Scores("0", like.maximize, like.chance, runs, dict.fromkeys(runs, seeds))


def _says(low: float, looks: Sequence[Look]) -> str:
    seeds = looks[-1].seeds
    if smallest_p(seeds) > looks[-1].spent:
        return f"With {seeds} seeds the study cannot reach a verdict, so none can be false."
    promise = f"at most {ALPHA:.0%} of studies may find a difference where there is none"
    if low > ALPHA:
        return f"The promise is broken: {promise}, and at least {low:.1%} do."
    return f"No sign that the promise is broken: {promise}."
