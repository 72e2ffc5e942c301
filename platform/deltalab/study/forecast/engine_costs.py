"""Forecasts what a study with an engine takes besides time: tokens and room on disk."""

import math
from collections.abc import Sequence

from deltalab.engines.checkpoints import BYTES_A_PARAMETER
from deltalab.models.costs import ModelCosts
from deltalab.study.planning.plan import Plan

BYTES_A_WEIGHT = 4
"""The bytes of a kept weight, in fp32."""
KEEP = 3
"""The checkpoints of a training beside the one that is written, unless `checkpoint.keep` says otherwise."""
BESIDE_STEPS = {"gpu": 40.0, "cpu": 15.0}
"""Seconds that a run takes beside its steps and what `engine.evaluate` asks, such as to start: docs/decisions/213."""


def beside_steps(plan: Plan) -> float:
    """Returns the seconds that each run takes beside its steps and its evaluations; 0 without an engine."""
    return 0.0 if plan.spec.engine is None else BESIDE_STEPS["gpu" if plan.spec.resources.gpu else "cpu"]


def engine_notes(plan: Plan, costs: Sequence[ModelCosts], places: int) -> list[str]:
    """Returns the notes on a study's engine; none without an engine.

    Args:
        plan: The study.
        costs: The costs of each arm's model.
        places: The trainings at a time.
    """
    engine = plan.spec.engine
    if engine is None:
        return []
    tokens, kept, largest = 0, 0, 0
    apart = engine.evaluate_every
    for arm, cost in zip(plan.arms, costs, strict=True):
        train, runs = arm.config["train"], plan.confirmed(arm)
        tokens += runs * train["steps"] * train["batch_size"] * plan.tasks[arm.task].length
        kept += runs * cost.parameters * (BYTES_A_PARAMETER + BYTES_A_WEIGHT)
        milestones = 0 if apart is None else train["steps"] // apart
        largest = max(largest, cost.parameters * (engine.settings.get("checkpoint.keep", KEEP) + milestones))
    at_once = places * largest * BYTES_A_PARAMETER
    gpus = int(plan.spec.resources.gpu)
    most = "at most " if any(arm.config["train"].get("seconds") for arm in plan.arms) else ""
    of_each = f"{gpus} GPU{'s' * (gpus != 1)}" if gpus else f"{engine.processes} process{'es' * (engine.processes > 1)}"
    return [
        f"engine: {engine.name} trains {plan.runs} runs one by one on {of_each} each: {most}{_count(tokens)} tokens in "
        f"all. Newest checkpoints and weights take {_gib(kept)} at the end, and up to {_gib(at_once)} more "
        "while runs train."
    ]


def _count(number: int) -> str:
    """Returns a number of tokens as text.

    >>> _count(15_000_000_000)
    '15.0B'
    """
    for unit, factor in (("B", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g}{unit}" if number < 10 * factor else f"{number / factor:,.1f}{unit}"
    return f"{number:,}"


def _gib(size: float) -> str:
    """Returns a number of bytes as text."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**29 else f"{math.ceil(size / 2**20):,} MiB"
