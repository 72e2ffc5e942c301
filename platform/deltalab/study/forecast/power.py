"""Forecasts, before a study runs, how large an effect must be for the study to find it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from deltalab.store import Store
from deltalab.study.answers.recorded_scores import scores_by_task
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab.study.statistics.joint_test import ALPHA, Look, rejects, smallest_p
from deltalab.tasks import Task

POWER = 0.8
"""The probability with which a study finds an effect that the forecast calls detectable."""
STUDIES = 100
"""How many studies are simulated to find the detectable effect."""
MOST_ARMS = 12
"""The most arms of a simulated study. More arms would change the detectable effect little and take long."""


@dataclass(frozen=True)
class Spread:
    """How much the scores of seeds differ on a task.

    Attributes:
        task: The task's name in the study.
        metric: The metric of the scores.
        sd: The standard deviation of a seed's score.
        source: The study that the standard deviation was read from, in words.
    """

    task: str
    metric: str
    sd: float
    source: str


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
        >>> from deltalab.study.statistics.joint_test import one_look
        >>> round(detectable(one_look(9), 1), 1) < round(detectable(one_look(6), 7), 1)
        True
    """
    seeds = looks[-1].seeds
    if smallest_p(seeds) > ALPHA:
        return math.inf
    random = np.random.default_rng(0)
    effects = np.geomspace(0.25, 16, 40)
    least = []
    for _ in range(STUDIES):
        scores = random.normal(size=(1 + min(arms, MOST_ARMS), seeds))
        differences = list(scores[1:] - scores[0])
        rejected = np.any([rejects(differences, -effects, looks[:k]) for k in range(1, len(looks) + 1)], axis=0)
        least.append(effects[np.argmax(rejected)] if rejected.any() else math.inf)
    return float(np.quantile(least, POWER))


def spreads(store: Store, tasks: Mapping[str, Task]) -> list[Spread]:
    """Reads the spread of scores on each task from the latest study in the ledger of that task with equal parameters.

    For each arm, the standard deviation of its differences to the base is divided by sqrt(2). The spread is the median
    of this number over the arms.

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
            sds = [
                float(np.std(differences, ddof=1)) / math.sqrt(2)
                for arm in (scores.others if scores else ())
                if scores and len(differences := scores.differences(arm)) > 2
            ]
            if sds:
                known.append(Spread(label, task.metric, float(np.median(sds)), f"study {study.address} in the ledger"))
                break
    return known


def _as_json(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns parameters as the ledger stores them, with lists in place of tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
