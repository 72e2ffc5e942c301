"""Asks Optuna for the next candidate of a search."""

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from deltalab.study.plan import Plan
from deltalab.study.space import Search

BATCH = 10
"""How many candidates a search asks Optuna for at a time. The first ten are drawn without looking at any result."""
COSTS = ("flops_per_token", "state_size")
"""The costs that a search weighs against the score; every trial measures them."""

optuna.logging.set_verbosity(logging.ERROR)


@dataclass
class Candidate:
    """Values drawn. infeasible: they make no model, so that no trial runs.

    score, costs: None and () until the trial has ended; NaN where it failed or diverged, or could not run.
    """

    values: dict[str, Any]
    score: float | None = None
    costs: tuple[float, ...] = ()
    infeasible: bool = False


def suggest(plan: Plan, task: str, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The values of the candidate that comes after `candidates`.

    They depend on the candidate's number and on the results of earlier batches alone. Optuna is told that the others
    of the same batch are running, and keeps away from them (its "constant liar"). A budget that covers every
    combination of choices takes them in order.
    """
    budget, number = plan.spec.search, len(candidates)
    assert budget is not None
    if budget.enumerated:
        return next(islice(budget.combinations(), number, None))
    maximize, minimize = optuna.study.StudyDirection.MAXIMIZE, optuna.study.StudyDirection.MINIMIZE
    directions = [maximize if plan.tasks[task].maximize else minimize]
    directions += [minimize] * len(COSTS)
    spaces = {path: _distribution(search) for path, search in budget.searched.items()}
    seed = int.from_bytes(hashlib.sha256(f"{plan.spec.name}/{number}".encode()).digest()[:4], "little")
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=BATCH, constant_liar=True)
    study = optuna.create_study(sampler=sampler, directions=directions)
    for before, candidate in enumerate(candidates):
        params = {path: _to_optuna(value, budget.searched[path]) for path, value in candidate.values.items()}
        state, values = TrialState.COMPLETE, None
        if candidate.infeasible:
            state = TrialState.PRUNED  # Optuna ranks it below every trial that ended
        elif before >= batch_start(number):
            state = TrialState.RUNNING
        else:
            assert candidate.score is not None
            # A diverged trial says as much about its region as a trial that learned nothing.
            score = plan.tasks[task].chance if math.isnan(candidate.score) else candidate.score
            values = [score, *candidate.costs]
            if any(map(math.isnan, values)):
                continue  # its costs are not known
        trial = optuna.trial.create_trial(params=params, distributions=spaces, state=state, values=values)
        study.add_trial(trial)
    params = study.ask(spaces).params
    return {path: json.loads(str(value)) if budget.searched[path].choice else value for path, value in params.items()}


def batch_start(number: int) -> int:
    """The number of the first candidate in the same batch.

    >>> batch_start(12)
    10
    """
    return number // BATCH * BATCH


def _distribution(search: Search) -> BaseDistribution:
    if search.log_uniform is not None:
        return FloatDistribution(*search.log_uniform, log=True)
    if search.uniform is not None:
        return FloatDistribution(*search.uniform)
    if search.integers is not None:
        return IntDistribution(*search.integers)
    assert search.choice is not None
    return CategoricalDistribution([_to_optuna(value, search) for value in search.choice])


def _to_optuna(value: Any, search: Search) -> CategoricalChoiceType:
    """A value as its distribution has it: choices are JSON, since they may be whole rules and Optuna takes text."""
    found: CategoricalChoiceType = json.dumps(value) if search.choice else value
    return found
