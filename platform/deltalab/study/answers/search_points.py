"""Lists the candidates of a search and the base as points, with names, scores, settings and a place on the front."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from deltalab.errors import InputError
from deltalab.statistics.pareto import front
from deltalab.store import Arm, Store, Study, TrialRow
from deltalab.study.answers.recorded_scores import RecordedScores, current
from deltalab.study.planning.tuning_candidates import trial_name
from deltalab.study.searching.results import CandidateResult, at_chance, objective_point, objective_scores
from deltalab.study.specs.recorded_study import RecordedSpec, RecordedTask, recorded_tasks
from deltalab.study.specs.sections.budget import COSTS, Objective, Searching
from deltalab.study.specs.setting_paths import setting


@dataclass(frozen=True)
class Point:
    """A candidate that trained, or the base.

    Attributes:
        name: The arm's name if the point is the base or a finalist. Any other candidate is called by its
            number: `candidate 7`, `random candidate 2` if random search drew it, `warm candidate 0` if the study
            names it.
        number: The number of the candidate; None for the base.
        drawn_by: What drew the candidate, such as `tpe`, `random` or `warm`; `tuning` for the base.
        rung: The last rung of successive halving at which the candidate trained, from 0.
        scores: The scores on validation at `rung`, by objective. The base has the scores of its tuned values.
        values: The settings in which the candidate differs from the base, by path.
        on_front: Whether no other candidate of the last rung beats this one in all objectives. A candidate that is at
            chance is never on the front, and neither is the base.
        settings: All settings that the search chose for the candidate. For the base: the base's values that are also
            in the search space.
        first: The scores at the lowest fidelity, which all candidates have. The base has such scores only if there
            is no other fidelity.
        at_chance: Whether the candidate is better than chance on none of the tasks.
    """

    name: str
    number: int | None
    drawn_by: str
    rung: int
    scores: dict[str, float]
    values: dict[str, Any]
    on_front: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    at_chance: bool = False

    @property
    def is_arm(self) -> bool:
        """Whether the point is the base or a finalist."""
        return "candidate " not in self.name


def points(
    store: Store,
    study: Study,
    objectives: Sequence[Objective],
    results: Sequence[CandidateResult],
    arms: Sequence[Arm],
    trials: list[TrialRow],
) -> list[Point]:
    """Returns the points: the base, the finalists, the rest of the front, then the others by the first objective.

    Args:
        store: The ledger.
        study: A study with a search.
        objectives: The objectives of the search.
        results: The recorded result of each candidate at each rung, the lowest rung first.
        arms: The arms of the study, in order.
        trials: All trials of the study.
    """
    space, base = RecordedSpec(study.spec).search, next(arm for arm in arms if arm.is_base)
    chance = chance_levels(objectives, recorded_tasks(study))
    configs = {trial.number: (trial.task, trial.config) for trial in trials if trial.stage == "tune"}
    best_trials = _best_trials(store, study, arms, trials)
    tuned = [trial.values for trial in best_trials.values()]
    first = {result.number: result.scores for result in results if result.rung == 0}
    finalists = _finalist_names(base, arms, trials)
    every = _base_points(store, space, objectives, base, best_trials)
    # Rungs are in order, so that the last one of each candidate is kept.
    last_results = {result.number: result for result in results if result.infeasible is None}
    for number, result in last_results.items():
        task, config = configs[number]
        every.append(
            Point(
                name=finalists.get(_json(result.values)) or trial_name(base.name, "tune", number, space.trials),
                number=number,
                drawn_by=result.drawn_by,
                rung=result.rung,
                scores=result.scores,
                values=differences_from_base(base.config[task], config, tuned, result.values),
                settings=dict(result.values),
                first=first.get(number, {}),
                at_chance=at_chance(objectives, result.scores, chance),
            )
        )
    # The cheapest model is on the front even if it has learned nothing. So models at chance are left out.
    eligible = [i for i, point in enumerate(every) if point.rung == len(space.rungs) - 1 and not point.at_chance]
    for place in front([objective_point(objectives, every[i].scores) for i in eligible]) if eligible else ():
        every[eligible[place]] = replace(every[eligible[place]], on_front=True)
    ranks = {arm.name: rank for rank, arm in enumerate(arms)}

    def order(point: Point) -> tuple[int, bool, float]:
        (score,) = objective_point(objectives[:1], point.scores)
        return ranks.get(point.name, len(ranks)), not point.on_front, math.inf if math.isnan(score) else score

    return sorted(every, key=order)


def chance_levels(objectives: Sequence[Objective], tasks: Mapping[str, RecordedTask]) -> dict[str, float]:
    """Returns the chance level of each objective that is a metric of a task. Unknown chance levels are left out.

    Examples:
        >>> chance_levels([Objective("accuracy", "mqar", True)], {"mqar": RecordedTask("mqar", "accuracy", True, 0.5)})
        {'accuracy@mqar': 0.5}
    """
    levels = {str(goal): tasks[goal.task].chance for goal in objectives if goal.task and goal.name not in COSTS}
    return {name: float(level) for name, level in levels.items() if level is not None}


def differences_from_base(
    base: Mapping[str, Any], config: Mapping[str, Any], tuned: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of a candidate that differ from the base's values, by path.

    Args:
        base: The base's configuration with every setting spelled out, so that two spellings of a gate are equal.
        config: The candidate's configuration with every setting spelled out.
        tuned: The base's tuned values on each task. A tuned setting differs if it differs on any task.
        values: The candidate's values by path.

    Examples:
        >>> base = {"rule": {"name": "gla", "beta": {"const": {"value": 1}}}, "train": {"lr": 0.1}}
        >>> differences_from_base(base, base, [{"train.lr": 0.2}], {"rule": "gla", "rule.beta": 1, "train.lr": 0.1})
        {'train.lr': 0.1}
    """

    def is_same(path: str, value: Any) -> bool:
        if any(path in by_path for by_path in tuned):
            return all(by_path.get(path) == value for by_path in tuned)
        if path == "rule":
            return bool(base["rule"] == config["rule"])
        try:
            return bool(setting(base, path, "base") == setting(config, path, "candidate"))
        except InputError:  # a knob that the base's rule does not have
            return False

    return {path: value for path, value in values.items() if not is_same(path, value)}


def _finalist_names(base: Arm, arms: Sequence[Arm], trials: list[TrialRow]) -> dict[str, str]:
    """The names of the finalists' arms, by the values of the candidates that became finalists."""
    # The first training that a finalist tries is that of its candidate. Old ledgers do not mark it as a confirmation.
    values: dict[str, dict[str, Any]] = {}
    for trial in sorted(current(trials), key=lambda trial: trial.stage == "confirm"):
        if trial.arm != base.name and (trial.stage == "tune" or trial.number == 0):
            values.setdefault(trial.arm, trial.values)
    names: dict[str, str] = {}
    for arm in arms:
        if arm.name in values and not arm.is_base:
            names.setdefault(_json(values[arm.name]), arm.name)
    return names


def _best_trials(store: Store, study: Study, arms: Sequence[Arm], trials: list[TrialRow]) -> dict[str, TrialRow]:
    """For each task, the base's trial with the best mean validation score over the seeds of confirmation."""
    ledger, base = RecordedScores(store, study, trials), next(arm.name for arm in arms if arm.is_base)
    best: dict[str, TrialRow] = {}
    for name, task in ledger.tasks.items():
        number = ledger.scores(task, arms).shown(base)
        for trial in ledger.of(base, name):
            if trial.number == number:
                best.setdefault(name, trial)
    return best


def _base_points(
    store: Store, space: Searching, objectives: Sequence[Objective], base: Arm, best_trials: Mapping[str, TrialRow]
) -> list[Point]:
    """The base's point, with its best training on each task; [] until every task has such a training."""
    if best_trials.keys() != base.config.keys():
        return []
    known = store.known_trials(trial.key for trial in best_trials.values())
    scores = objective_scores(objectives, {task: known[trial.key] for task, trial in best_trials.items()})
    last = len(space.rungs) - 1
    settings = _base_settings(space, base, next(iter(best_trials.values())).values)
    return [Point(base.name, None, "tuning", last, scores, {}, settings=settings, first={} if last else scores)]


def _base_settings(space: Searching, base: Arm, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """The base's values of the settings in the search space, with the base's tuned values on the first task."""
    config = next(iter(base.config.values()))
    settings: dict[str, Any] = dict(tuned)
    for path, search in space.searched.items():
        if path not in tuned:
            with suppress(InputError):  # a knob that the base's rule does not have
                value = config["rule"]["name"] if path == "rule" else setting(config, path, base.name)
                if search.pattern is None and search.holds(value):
                    settings[path] = value
    return settings


def _json(values: Mapping[str, Any]) -> str:
    """Values as JSON text that is equal for equal values, for use as a key."""
    return json.dumps(values, sort_keys=True)
