"""Writes the candidates of a search as studies of Optuna, which optuna-dashboard opens."""

import json
import math
import sqlite3
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.answers.search_points import Point, points
from deltalab.study.searching.candidate_names import title
from deltalab.study.searching.results import CandidateResult, candidate_results, objectives_of
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.sections.budget import Searching
from deltalab.study.specs.sections.search_space import Search


@dataclass(frozen=True)
class ExportedStudy:
    """A study of Optuna that was written.

    Attributes:
        name: The name of the study in Optuna.
        trials: How many trials it has.
        complete: How many of the trials have a value of every objective.
    """

    name: str
    trials: int
    complete: int


def export_optuna(store: Store, study_id: int, file: Path) -> list[ExportedStudy]:
    """Writes a search to a new SQLite file of Optuna: one study for each rung of successive halving.

    A trial is a candidate, its parameters are the knobs that exist for it, and its values are the objectives in the
    order of the report. Choices other than numbers and words are written as JSON. A candidate that made no model,
    failed or diverged is a failed trial, which names the reason.

    Args:
        store: The ledger.
        study_id: The id of a study with a search.
        file: The file to write.

    Returns:
        The studies that were written, in the order of rungs. A rung without candidates has no study.

    Raises:
        InputError: The study has no search or no candidates, or the file exists or cannot be written.
    """
    study = store.study(study_id)
    if not RecordedSpec(study.spec).is_search:
        raise InputError(f"study '{study.name}' has no search, and Optuna shows searches alone")
    space = RecordedSpec(study.spec).search
    objectives = objectives_of(space, store, study_id)
    objective_names = [*map(str, objectives)]
    results = candidate_results(study.spec, store, study_id)
    if not results:
        raise InputError(f"study '{study.name}' has no candidates yet: deltalab study run {study.address}")
    if file.exists():
        raise InputError(f"{file}: exists; give the path of a new file")
    arms, rows = store.arms(study_id), store.trials(study_id)
    by_number = {point.number: point for point in points(store, study, objectives, results, arms, rows)}
    directions = [StudyDirection.MAXIMIZE if goal.maximize else StudyDirection.MINIMIZE for goal in objectives]
    # The storage is in memory, since Optuna would write each trial to the disk by itself.
    storage = optuna.storages.RDBStorage("sqlite://")
    exported = []
    for rung, settings in enumerate(space.rungs):
        at_rung = sorted((result for result in results if result.rung == rung), key=lambda result: result.started_at)
        if at_rung:
            name = ", ".join([study.address, *(f"{path} {value}" for path, value in settings.items())])
            optuna_study = optuna.create_study(storage=storage, study_name=name, directions=directions)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                optuna_study.set_metric_names(objective_names)
            if None in by_number:  # the base, which is no candidate
                optuna_study.set_user_attr("base", _known(by_number[None].scores))
            trials = [_trial(result, by_number.get(result.number), space, objective_names) for result in at_rung]
            optuna_study.add_trials(trials)
            complete = sum(trial.state == TrialState.COMPLETE for trial in trials)
            exported.append(ExportedStudy(name, len(trials), complete))
    try:
        with closing(sqlite3.connect(file)) as target, closing(storage.engine.raw_connection()) as source:
            assert isinstance(source.driver_connection, sqlite3.Connection)
            source.driver_connection.backup(target)
    except sqlite3.Error as error:
        raise InputError(f"{file}: cannot be written: {error}") from error
    return exported


def _known(scores: Mapping[str, float]) -> dict[str, float]:
    """The scores that are finite."""
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _trial(candidate: CandidateResult, point: Point | None, space: Searching, objectives: list[str]) -> FrozenTrial:
    """A candidate at one rung. `point` is None for a candidate that made no model."""
    params, distributions = {}, {}
    for name, value in (space.drawn(candidate.values) or {}).items():
        params[name], distributions[name] = _param(value), distribution(space.knobs[name])
    attributes: dict[str, Any] = {"candidate": candidate.number, "drawn by": candidate.drawn_by}
    if point is not None:
        attributes |= {"what it is": title(point.values)} | ({"arm": point.name} if point.is_arm else {})
    values = [candidate.scores[name] for name in objectives]
    if not all(map(math.isfinite, values)):
        attributes |= {"failed": candidate.infeasible or "it failed or diverged", **_known(candidate.scores)}
        trial = create_trial(state=TrialState.FAIL, params=params, distributions=distributions, user_attrs=attributes)
    else:
        trial = create_trial(values=values, params=params, distributions=distributions, user_attrs=attributes)
    trial.datetime_start, trial.datetime_complete = _local(candidate.started_at), _local(candidate.finished_at)
    return trial


def _local(time: datetime) -> datetime:
    """A time as Optuna keeps it: the time of this machine, without a zone."""
    return time.astimezone().replace(tzinfo=None)


def distribution(knob: Search) -> BaseDistribution:
    """Returns Optuna's distribution of the values of a knob, for display.

    The sampler of a search draws some knobs from another distribution.

    Examples:
        >>> distribution(Search(choice=("gla", {"name": "comba"})))
        CategoricalDistribution(choices=('gla', '{"name": "comba"}'))
    """
    if knob.choice is not None:
        return CategoricalDistribution([_param(value) for value in knob.choice])
    low, high = knob.extremes
    if knob.integers is not None:
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=knob.log_uniform is not None)


def _param(value: Any) -> CategoricalChoiceType:
    """A value in a form that Optuna keeps: a list or a dict as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value
