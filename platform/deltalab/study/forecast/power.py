"""Forecasts, before a study runs, how large an effect must be for the study to find it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from deltalab.reading import pairs
from deltalab.statistics.joint_test import ALPHA, Look, rejected_by_look, seeds_needed, smallest_p
from deltalab.statistics.seed_choice import Scores
from deltalab.statistics.unbalanced import Groups, compare_one
from deltalab.store import Store
from deltalab.study.answers.recorded_scores import scores_by_task
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab.tasks import Task

POWER = 0.8
"""The probability with which a study finds an effect that the forecast calls detectable."""
STUDIES = 100
"""How many studies are simulated to find the detectable effect."""
MOST_ARMS = 12
"""The most arms of a simulated study. More arms would change the detectable effect little and take long."""
COARSE = 3
EFFECTS = np.geomspace(0.25, 16, 1 + 13 * COARSE)
"""The effects that are looked for, in standard deviations of a seed's score: first every third of them."""
MOST_SEEDS = 32
"""The most seeds of a simulated study. The effect that more seeds find falls with the square root of their number."""
MOST_LOOKS = 4
"""How many of its last looks a simulated study takes. Earlier ones spend little of the error."""

SHIPPED = Path(__file__).with_name("spreads.json")
"""The spreads that come with deltalab. `benchmarks/measures.py` measures them."""


@dataclass(frozen=True)
class Spread:
    """How much the scores of seeds differ on a task.

    Attributes:
        task: The task's name in the study.
        metric: The metric of the scores.
        sd: The standard deviation of a seed's score.
        source: Where the standard deviation comes from, in words.
        correlation: The correlation of a seed's scores between arms, the mean over all pairs of arms; None if it is not
            known.
    """

    task: str
    metric: str
    sd: float
    source: str
    correlation: float | None = None

    @property
    def sd_of_groups(self) -> float:
        """The standard deviation of a seed's score where seeds are not paired: `sd` is without what arms share."""
        return self.sd / math.sqrt(1 - min(max(self.correlation or 0.0, 0.0), 0.99))


@dataclass(frozen=True)
class MeasuredSpread:
    """A spread that comes with deltalab, and the training that it was measured on.

    Attributes:
        task: The task's name in the registry.
        metric: The metric of the scores.
        parameters: The parameters of the task.
        steps: The steps of each training.
        sd: The standard deviation of a seed's score.
        correlation: The correlation of a seed's scores between arms; None if it is not known.
        source: The study and profile whose arms were trained.
    """

    task: str
    metric: str
    parameters: Mapping[str, Any]
    steps: int
    sd: float
    correlation: float | None
    source: str

    def differences(self, parameters: Mapping[str, Any], steps: int) -> dict[str, Any]:
        """Returns what differs from a task with `parameters` that trains for `steps`, with this spread's values."""
        here, there = {**self.parameters, "steps": self.steps}, {**parameters, "steps": steps}
        return {key: value for key, value in here.items() if value != there.get(key)}

    def distance(self, parameters: Mapping[str, Any], steps: int) -> float:
        """Returns how far this spread is from a task: the sum of |log(a / b)| of numbers, and 1 for anything else."""
        there = {**parameters, "steps": steps}
        return math.fsum(_apart(value, there.get(key)) for key, value in self.differences(parameters, steps).items())


@cache
def detectable(looks: tuple[Look, ...], arms: int) -> float:
    """Returns the effect of one arm that a study finds with 80% probability, in standard deviations of a seed's score.

    Studies are simulated with normal scores of equal variance. In them no arm stops early because it has no prospect of
    a decision.

    Args:
        looks: The looks of the study.
        arms: The arms that are tested together.

    Returns:
        The effect; infinite if the seeds are too few to find any effect.

    Examples:
        >>> from deltalab.statistics.joint_test import one_look
        >>> round(detectable(one_look(9), 1), 1) < round(detectable(one_look(6), 7), 1)
        True
    """
    seeds = looks[-1].seeds
    if smallest_p(seeds) > ALPHA:
        return math.inf
    smaller = max(1.0, seeds / MOST_SEEDS)
    by_seeds = {max(2, round(look.seeds / smaller)): look for look in looks[-MOST_LOOKS:]}
    looks = tuple(replace(look, seeds=seeds) for seeds, look in by_seeds.items())
    seeds = looks[-1].seeds
    random = np.random.default_rng(0)
    least = []
    for _ in range(STUDIES):
        scores = random.normal(size=(1 + min(arms, MOST_ARMS), seeds))
        least.append(_least(list(scores[1:] - scores[0]), looks))
    return float(np.quantile(least, POWER)) / math.sqrt(smaller)


def _least(differences: Sequence[np.ndarray], looks: Sequence[Look]) -> float:
    """Returns the least of `EFFECTS` that a simulated study finds at any look, infinite if there is none."""
    known = rejected_by_look(differences, looks)
    coarse = EFFECTS[::COARSE]
    found = known(-coarse).any(axis=0)
    if not found.any():
        return math.inf
    at = COARSE * int(np.argmax(found))
    near = EFFECTS[max(0, at - COARSE + 1) : at + 1]
    return float(near[np.argmax(known(-near).any(axis=0))])


@cache
def detectable_by_groups(seeds: int, of_base: int, arms: int, correlation: float = 0.0) -> float:
    """Returns what `detectable` does where the base has more seeds than an arm.

    Args:
        seeds: The seeds of an arm.
        of_base: The seeds of the base.
        arms: The arms that are tested together.
        correlation: The correlation of a seed's scores between arms.

    Returns:
        The effect; infinite if the arms are too many to find any effect.

    Examples:
        >>> 1.9 < detectable_by_groups(6, 16, 7) < 2.2
        True
    """
    random, shared = np.random.default_rng(0), min(max(correlation, 0.0), 1.0)
    others = min(arms, MOST_ARMS) - 1
    least = []
    for _ in range(STUDIES):
        of_seed = math.sqrt(shared) * random.normal(size=of_base)
        base = of_seed + math.sqrt(1 - shared) * random.normal(size=of_base)
        scores = of_seed[:seeds] + math.sqrt(1 - shared) * random.normal(size=(1 + others, seeds))
        found = compare_one(Groups.plain(scores[0], base), [float(arm.var(ddof=1)) for arm in scores[1:]], arms)
        least += [-found.low, found.high]  # An effect, up or down, shifts the interval, which then leaves out 0.
    return float(np.quantile(least, POWER, method="higher"))


def seeds_to_equal(sd: float, margin: float, arms: int) -> int:
    """Estimates how many seeds find an arm that does not differ from the base equal, with 80% probability.

        n = 2 ((z_{1 - alpha / m} + z_{(1 + power) / 2}) sd / margin)^2    for m arms

    These are two one-sided t tests with Bonferroni's correction, without the correlation of seeds.

    Args:
        sd: The standard deviation of a seed's score.
        margin: The least difference that matters, in the same unit.
        arms: The arms that are tested together.

    Examples:
        >>> seeds_to_equal(0.1, 0.1, 1), seeds_to_equal(0.1, 0.1, 7)
        (18, 28)
    """
    from scipy import stats

    z = float(stats.norm.ppf(1 - ALPHA / arms) + stats.norm.ppf((1 + POWER) / 2))
    return max(seeds_needed(), math.ceil(2 * (z * sd / margin) ** 2))


def spreads(store: Store, tasks: Mapping[str, Task]) -> list[Spread]:
    """Reads the spread of scores on each task from the latest study in the ledger of that task with equal parameters.

    Args:
        store: The ledger.
        tasks: The tasks by the names that the plan gives them.

    Returns:
        The spreads of the tasks that the ledger knows.
    """
    known = []
    for label, task in tasks.items():
        for study in store.studies():
            names = [
                name
                for name, recorded in recorded_tasks(study).items()
                if (recorded.metric, recorded.parameters) == (task.metric, _as_json(asdict(task)))
            ]
            scores = scores_by_task(store, study).get(names[0]) if names else None
            if scores is None:
                continue
            found = spread_of(scores)
            if found is not None:
                sd, correlation = found
                known.append(Spread(label, task.metric, sd, f"study {study.address} in the ledger", correlation))
                break
    return known


def spread_of(scores: Scores) -> tuple[float, float | None] | None:
    """Returns the standard deviation of a seed's score and the correlation of seeds, of arms as a report compares them.

    For each arm, the standard deviation of its differences to the base is divided by sqrt(2). The spread is the median
    of this number over the arms.

    Args:
        scores: The scores of a study on a task.

    Returns:
        Both; None if no arm has three seeds beside the base's.
    """
    paired = {arm: differences for arm in scores.others if len(differences := scores.differences(arm)) > 2}
    if not paired:
        return None
    seeds = min(map(len, paired.values()))
    by_arm = [list(scores.results[arm].values())[:seeds] for arm in (scores.base, *paired)]
    return paired_sd([*paired.values()]), seed_correlation(by_arm)


def nearest_spreads(
    tasks: Mapping[str, Task], steps: Mapping[str, int], measured: Sequence[MeasuredSpread]
) -> list[Spread]:
    """Looks up the spread of scores on each task among spreads that were measured.

    The nearest spread of the same task and metric counts. `source` says what differs.

    Args:
        tasks: The tasks by the names that the plan gives them.
        steps: The steps of the base's training, by the same names.
        measured: The spreads, such as those that are `shipped`.

    Returns:
        The spreads of the tasks that were measured at all.
    """
    known = []
    for label, task in tasks.items():
        parameters = _as_json(asdict(task))
        same = [one for one in measured if (one.task, one.metric) == (task.name, task.metric)]
        if same:
            nearest = min(same, key=lambda one: one.distance(parameters, steps[label]))
            others = nearest.differences(parameters, steps[label])
            source = f"measured on {nearest.source}" + (f" with {pairs(others)}" if others else "")
            known.append(Spread(label, task.metric, nearest.sd, source, nearest.correlation))
    return known


def paired_sd(differences: Sequence[Sequence[float]]) -> float:
    """Returns the standard deviation of a seed's score: the median over arms of sd(difference to the base) / sqrt(2).

    Args:
        differences: The differences of each arm, by seed.
    """
    return float(np.median([np.std(d, ddof=1) for d in differences])) / math.sqrt(2)


def seed_correlation(scores: Sequence[Sequence[float]]) -> float | None:
    """Returns the correlation of seeds between arms, the mean over pairs of arms; None if no pair of arms varies.

    Args:
        scores: The scores of each arm, by seed.

    Examples:
        >>> seed_correlation([[1, 2, 3], [2, 4, 6], [5, 5, 5]])
        1.0
    """
    varying = [row for row in scores if np.ptp(row) > 0]
    if len(varying) < 2:
        return None
    return round(float(np.corrcoef(varying)[np.triu_indices(len(varying), 1)].mean()), 12)


@cache
def shipped() -> tuple[MeasuredSpread, ...]:
    """Reads the spreads that come with deltalab."""
    return tuple(MeasuredSpread(**one) for one in json.loads(SHIPPED.read_text()))


def _apart(first: Any, second: Any) -> float:
    are_positive = all(isinstance(value, int | float) and value > 0 for value in (first, second))
    return abs(math.log(first / second)) if are_positive else 1.0


def _as_json(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters as the ledger stores them, with lists in place of tuples."""
    stored: dict[str, Any] = json.loads(json.dumps(parameters))
    return stored
