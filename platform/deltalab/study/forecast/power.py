"""What effect a study can find, before it runs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np

from deltalab.store import Store
from deltalab.study.answers.recorded_scores import results
from deltalab.study.statistics.joint_test import ALPHA, Look, rejects, smallest_p
from deltalab.tasks import Task

POWER = 0.8
STUDIES = 100
"""Simulated studies from which an effect is found."""
MOST_ARMS = 12
"""Arms of a simulated study; more arms change the effect little and take long."""


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a seed's score on a task, and where it is from."""

    task: str
    metric: str
    sd: float
    source: str


@cache
def detectable(looks: tuple[Look, ...], arms: int) -> float:
    """The effect on one arm that is found with 80% probability, in standard deviations of a seed's score.

    From simulated studies with normal scores of equal variance, in which no arm stops for want of prospect. Infinite
    where so few seeds cannot find any.

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
        told = np.any([rejects(differences, -effects, looks[:k]) for k in range(1, len(looks) + 1)], axis=0)
        least.append(effects[np.argmax(told)] if told.any() else math.inf)
    return float(np.quantile(least, POWER))


def spreads(store: Store, tasks: Mapping[str, Task]) -> list[Spread]:
    """The spread of scores that the ledger knows of each task, with the same parameters, from its latest study.

    The median over the arms of the standard deviation of their differences to the base, over sqrt(2).
    """
    found = []
    for label, task in tasks.items():
        for study in store.studies():
            names = [
                name
                for name, about in study.provenance["tasks"].items()
                if (about["metric"], about["parameters"]) == (task.metric, _as_json(asdict(task)))
            ]
            scores = results(store, study.id).get(names[0]) if names else None
            sds = [
                float(np.std(differences, ddof=1)) / math.sqrt(2)
                for arm in (scores.others if scores else ())
                if scores and len(differences := scores.differences(arm)) > 2
            ]
            if sds:
                found.append(Spread(label, task.metric, float(np.median(sds)), f"study {study.address} in the ledger"))
                break
    return found


def _as_json(parameters: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in parameters.items()}
