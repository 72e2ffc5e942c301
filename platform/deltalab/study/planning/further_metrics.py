"""The further metrics of a task that a study compares beside the task's own, in the same test."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from deltalab.errors import InputError, unknown
from deltalab.study.specs.sections.ladder_sizes import task_of
from deltalab.study.specs.study_file import StudySpec
from deltalab.tasks import IGNORE, Task
from deltalab.tasks.task import MARGINS

LESS_IS_BETTER = re.compile(r"loss|bits|nats|perplexity|error|distance")
"""Words of metrics whose smaller value is better. All others are shares of right answers, from 0 to 1."""


def further_metrics(spec: StudySpec, tasks: Mapping[str, Task]) -> list[dict[str, Any]]:
    """Describes the metrics of the study's section `compare`, as the ledger keeps them.

    Args:
        spec: The study.
        tasks: The tasks by the names that the plan gives them, which name a ladder's size as well.

    Raises:
        InputError: There is no such task, or nothing measures the metric.
    """
    for name in spec.compare:
        if name not in spec.task:
            raise unknown("task", name, spec.task, where="compare")
    evaluated = spec.engine.evaluate if spec.engine else ()
    found = []
    for label, task in tasks.items():
        name = task_of(label, spec.scales.model_dump() if spec.scales else None, [*spec.task])
        for metric in spec.compare.get(name, ()):
            known = [other for other in metrics_of(task) if other != task.metric]
            if metric == task.metric:
                raise InputError(f"compare.{name}: {metric} is the task's own metric, which is compared anyway")
            asked = metric.partition(" ")[0]
            if metric not in known and not {asked, asked.partition("/")[0]} & {*evaluated}:
                by_evaluation = [f"{evaluation} METRIC" for evaluation in evaluated]
                raise unknown("metric", metric, [*known, *by_evaluation], where=f"compare.{name}")
            plain = metric.rpartition(" ")[2].partition("@")[0]
            less = LESS_IS_BETTER.search(metric) is not None
            found.append(
                {
                    "task": label,
                    "metric": metric,
                    "maximize": not less,
                    "chance": task.chance if less else 0.0,
                    "bounds": None if less else (0.0, 1.0),
                    "margin": spec.margin.get(metric, MARGINS.get(plain, 0.0)),
                }
            )
    return found


@cache
def metrics_of(task: Task) -> list[str]:
    """Lists the names of the metrics that a trial on a task measures, by measuring logits of zeros."""
    names: dict[str, None] = {}
    for label, other in task.evaluations().items():
        batch = other.batch("test", 1, 0, 0, torch.device("cpu"))
        scored = int((batch.targets != IGNORE).sum())
        names |= dict.fromkeys(
            name + (f"@{label}" if label else "")
            for name in other.measure(batch, torch.zeros(scored, other.vocab_size))
        )
    return [*names]
