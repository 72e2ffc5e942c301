"""What effect a study can find, before the study runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from deltalab.store import Store
from deltalab.study.answers.recorded_scores import scores_by_task
from deltalab.study.statistics.joint_test import ALPHA, Look, rejects, smallest_p
from deltalab.tasks import Task

POWER = 0.8
"""The probability with which an effect is found."""
STUDIES = 100
"""Simulated studies from which the effect follows."""
MOST_ARMS = 12
"""Arms of a simulated study; more arms change the effect little and take long."""


@dataclass(frozen=True)
class Spread:
    """How much the scores of seeds differ on a task.

    Attributes:
        task: The task's name in the study.
        metric: The metric of the scores.
        sd: The standard deviation of a seed's score.
        source: Where the standard deviation is from.
    """

    task: str
    metric: str
    sd: float
    source: str


@cache
def detectable(looks: tuple[Look, ...], arms: int) -> float:
    """The effect on one arm that is found with 80% probability, in standard deviations of a seed's score.

    The effect follows from simulated studies with normal scores of equal variance, in which no arm stops for want of
    prospect.

    Args:
        looks: The looks of the study.
        arms: The arms that are tested together.

    Returns:
        The effect; infinite if so few seeds cannot find any effect.

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
    """Reads the spread of scores on tasks from the ledger: from the latest study of each task with equal parameters.

    A spread is the median over the arms of the standard deviation of their differences to the base, over sqrt(2).

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
                for name, facts in study.provenance["tasks"].items()
                if (facts["metric"], facts["parameters"]) == (task.metric, _as_json(asdict(task)))
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
    """The parameters as the ledger has them, with lists in place of tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
