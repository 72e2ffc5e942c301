"""Reads the candidates of a search from the ledger, and computes their scores by objective."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from deltalab.store import Store, TrialRow, TrialSummary
from deltalab.study.planning.tuning_candidates import MOST_DRAWN, PROPOSED_FROM, RANDOM_FROM, WARM_FROM
from deltalab.study.searching.halving import Halving, by_lot, going_on, halving
from deltalab.study.specs.recorded_study import RecordedSpec, recorded_tasks
from deltalab.study.specs.sections.budget import COSTS, Objective, Searching

Drawn = Literal["mixed", "tpe", "nsga2", "nsga3", "gp", "random", "warm", "proposed", "all"]
"""Where a candidate comes from: a sampler, `warm`, a proposer, or the list of all candidates."""


@dataclass(frozen=True)
class CandidateResult:
    """A candidate at one rung, as the ledger has it. Results that differ only in their times are equal.

    Attributes:
        number: The candidate's number.
        values: The values of the searched settings by path.
        scores: The score of each objective; NaN if a trial has not ended, has failed or has diverged.
        drawn_by: Where the candidate comes from.
        rung: The rung.
        infeasible: Why the candidate makes no model; None if it makes one.
        started_at: When the first of its trials began.
        finished_at: When the last of its trials ended.
    """

    number: int
    values: dict[str, Any]
    scores: dict[str, float]
    drawn_by: Drawn
    rung: int
    infeasible: str | None
    started_at: datetime = field(compare=False)
    finished_at: datetime = field(compare=False)


def drawn_by(number: int, space: Searching) -> Drawn:
    """Where the candidate with a number comes from."""
    if number >= PROPOSED_FROM:
        return "proposed"
    if number >= WARM_FROM:
        return "warm"
    if number >= RANDOM_FROM:
        return "random"
    return "all" if space.enumerated else space.sampler


def mean_score(summary: TrialSummary, metric: str, split: str) -> float:
    """The mean of a metric over all seeds; NaN if the trial failed or a seed diverged."""
    finals = summary.finals.get((split, metric), {})
    if summary.diverged or not finals:
        return math.nan
    return math.fsum(finals.values()) / len(finals)


def objective_scores(objectives: Sequence[Objective], trials: Mapping[str, TrialSummary]) -> dict[str, float]:
    """The score of a candidate for each objective.

    The score for a metric of a task is the mean validation score over the seeds. The score for a cost is the cost on
    the objective's task, or the largest cost over all tasks if the objective has no task.

    Args:
        objectives: What the search weighs.
        trials: The candidate's trials by task.

    Returns:
        The scores by the objective's name; NaN if a trial is missing, failed or diverged.
    """
    scores = {}
    for objective in objectives:
        if objective.name not in COSTS:
            trial = trials.get(objective.task or "")
            scores[str(objective)] = math.nan if trial is None else mean_score(trial, objective.name, "validation")
            continue
        costs = [_cost(trial, objective.name) for task, trial in trials.items() if objective.task in (None, task)]
        scores[str(objective)] = math.nan if not costs or any(map(math.isnan, costs)) else max(costs)
    return scores


def _cost(trial: TrialSummary, name: str) -> float:
    """A cost of a trial; NaN if it is not known."""
    if name == "parameters":
        return math.nan if trial.parameters is None else float(trial.parameters)
    return mean_score(trial, name, "cost")


def at_chance(objectives: Sequence[Objective], scores: Mapping[str, float], chance: Mapping[str, float]) -> bool:
    """Whether scores are better than chance on none of the tasks. False if the chance level of a task is not known.

    Args:
        objectives: What the search weighs.
        scores: The scores by the objective's name.
        chance: The chance level of each metric by the objective's name.
    """
    metrics = [objective for objective in objectives if objective.task and objective.name not in COSTS]
    levels = [(scores[str(metric)], chance.get(str(metric), math.nan), metric.maximize) for metric in metrics]
    return bool(levels) and all(score <= level if more else score >= level for score, level, more in levels)


def objective_point(objectives: Sequence[Objective], scores: Mapping[str, float]) -> list[float]:
    """Returns the scores of a candidate as a point. In each coordinate less is better."""
    return [-scores[str(objective)] if objective.maximize else scores[str(objective)] for objective in objectives]


def candidate_results(spec: Mapping[str, Any], store: Store, study_id: int) -> list[CandidateResult]:
    """Reads the candidates of a search from the ledger.

    The trainings of arms, which ledgers of old releases have beside the candidates, are left out.

    Args:
        spec: The study as the ledger has it.
        store: The ledger.
        study_id: The study's id in the ledger.

    Returns:
        Each candidate at each rung at which it has trained, in the order of numbers.
    """
    space = RecordedSpec(spec).search
    objectives = objectives_of(space, store, study_id)
    rows: dict[tuple[int, int], list[TrialRow]] = {}
    for row in store.trials(study_id):
        if row.stage == "tune" and not is_own(row.number, space):
            rows.setdefault((row.number, _rung(row, space)), []).append(row)
    known = store.known_trials(row.key for trained in rows.values() for row in trained)
    results = []
    for (number, rung), trained in sorted(rows.items()):
        trials = {row.task: known[row.key] for row in trained if row.state != "infeasible"}
        scores = objective_scores(objectives, trials)
        if len(trials) < len(spec["task"]):
            scores = dict.fromkeys(scores, math.nan)
        reason = next((row.error for row in trained if row.state == "infeasible"), None)
        started, finished = min(row.started_at for row in trained), max(row.finished_at for row in trained)
        source = drawn_by(number, space)
        results.append(CandidateResult(number, trained[0].values, scores, source, rung, reason, started, finished))
    return results


def halvings(spec: Mapping[str, Any], store: Store, study_id: int, results: Sequence[CandidateResult]) -> list[Halving]:
    """Reads from the ledger what successive halving dropped at each rung but the last, as far as the search has come.

    Args:
        spec: The study as the ledger has it.
        store: The ledger.
        study_id: The study's id in the ledger.
        results: The candidates that `candidate_results` returns.
    """
    space = RecordedSpec(spec).search
    objectives = objectives_of(space, store, study_id)
    feasible = [result for result in results if result.infeasible is None]
    rungs = [
        objective_points(objectives, {result.number: result.scores for result in feasible if result.rung == rung})
        for rung in range(len(space.rungs))
    ]
    between, points = [], rungs[0]
    for rung, reached in enumerate(rungs[1:]):
        if not reached:
            break
        went = going_on(lot_name(spec["name"], rung), points, space.halved[rung + 1])
        # If costs were counted anew since, the ledger has candidates that would not go on today: leave these out.
        after = {number: reached[number] for number in (*went[0], *went[1]) if number in reached}
        last = rung + 2 == len(rungs)
        best = space.finalists if last else space.halved[rung + 2] - by_lot(space.halved[rung + 2])
        ended = len(after) == len(went[0]) + len(went[1])
        between.append(halving(space.rungs[rung : rung + 2], points, went, after if ended else None, best))
        points = after
    return between


def objectives_of(space: Searching, store: Store, study_id: int) -> tuple[Objective, ...]:
    """Returns the objectives of a recorded study's search."""
    tasks = recorded_tasks(store.study(study_id))
    return space.weighed({name: (task.metric, task.maximize) for name, task in tasks.items()})


def objective_points(
    objectives: Sequence[Objective], scores: Mapping[int, Mapping[str, float]]
) -> dict[int, list[float]]:
    """The point of each candidate, by the number of the candidate."""
    return {number: objective_point(objectives, of_candidate) for number, of_candidate in scores.items()}


def lot_name(name: str, rung: int) -> str:
    """Returns the name that seeds the lot at a rung of a study."""
    return f"{name}/rung {rung}"


def is_own(number: int, space: Searching) -> bool:
    """Whether a number stands for an arm's training. Old releases recorded it apart from confirmation."""
    return MOST_DRAWN * space.trials <= number < RANDOM_FROM


def _rung(row: TrialRow, space: Searching) -> int:
    """Finds the rung at which a trial trained: the first that its configuration and number of seeds agree with."""
    for rung, settings in enumerate(space.rungs):
        trained = {path: row.config.get(path.split(".")[0], {}).get(path.split(".")[1]) for path in settings}
        trained |= {"train.seeds": len(row.runs)} if row.runs and "train.seeds" in trained else {}
        if all(trained[path] in (value, None) for path, value in settings.items()):
            return rung
    return 0
