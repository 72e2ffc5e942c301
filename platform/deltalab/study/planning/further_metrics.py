"""The further metrics of a task that a study compares beside the task's own, in the same test."""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from deltalab.errors import InputError, unknown
from deltalab.evaluation.metric_names import metric_names
from deltalab.study.planning.engine_limits import evaluated_on
from deltalab.study.specs.sections.engine import Engine
from deltalab.study.specs.sections.ladder_sizes import task_of
from deltalab.study.specs.study_file import StudySpec
from deltalab.tasks import IGNORE, Task
from deltalab.tasks.task import MARGINS

LESS_IS_BETTER = re.compile(r"loss|bits|nats|perplexity|error|distance|brier|^ter$")
"""Words of metrics whose smaller value is better."""

SHARES = re.compile(r"acc|exact_match|em|f1")
"""Beginnings of the metrics of lm-evaluation-harness that lie between 0 and 1. BLEU and others have other bounds."""


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
    found = []
    for label, task in tasks.items():
        name = task_of(label, spec.scales.model_dump() if spec.scales else None, [*spec.task])
        for metric in spec.compare.get(name, ()):
            if metric == task.metric:
                raise InputError(f"compare.{name}: {metric} is the task's own metric, which is compared anyway")
            own = metric in metrics_of(task)
            plain, bounded = (metric, True) if own else _of_evaluation(spec.engine, name, task, metric)
            less = LESS_IS_BETTER.search(plain) is not None
            found.append(
                {
                    "task": label,
                    "metric": metric,
                    "maximize": not less,
                    "chance": task.chance if less else 0.0,
                    "bounds": None if less or not bounded else (0.0, 1.0),
                    "margin": spec.margin.get(metric, MARGINS.get(re.split("[@ ]", plain)[0], 0.0)),
                }
            )
    return found


def _of_evaluation(engine: Engine | None, name: str, task: Task, metric: str) -> tuple[str, bool]:
    """Finds the metric of an evaluation that `engine.evaluate` asks for.

    What a task of lm-evaluation-harness measures that belongs to no suite, only a run tells: any metric of it is taken.

    Returns:
        The metric without the name of its task, and whether it lies between 0 and 1 if more of it is better.

    Raises:
        InputError: Neither the task nor an evaluation measures the metric.
    """
    known, of_harness = ([], []) if engine is None else metric_names(evaluated_on(engine, name, task))
    measured = {f"{title} {plain}": plain for title, plain in known}
    if metric in measured:
        return measured[metric], True
    asked, _, plain = metric.partition(" ")
    if asked in of_harness and plain:
        return plain, SHARES.match(plain) is not None
    by_harness = [f"{title} METRIC" for title in of_harness]
    own = [other for other in metrics_of(task) if other != task.metric]
    # Of an evaluation that is asked, its own metrics alone: those of all suites would hide them.
    of_title = [f"{title} {plain}" for title, plain in known if asked == title.partition(" ")[0]]
    raise unknown("metric", metric, of_title or [*own, *measured, *by_harness], where=f"compare.{name}")


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
