"""Writes what a search tried as studies of Optuna, which optuna-dashboard opens."""

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
from deltalab.study.answers.search_results import Point, points
from deltalab.study.reports.candidate_names import title
from deltalab.study.searching.phase import Found, candidates, objectives_of
from deltalab.study.specs.budget import Searching
from deltalab.study.specs.search_space import Search


@dataclass(frozen=True)
class Exported:
    """A study of Optuna. trials: all of them; complete: those with a value of every objective."""

    name: str
    trials: int
    complete: int


def export_optuna(store: Store, study_id: int, file: Path) -> list[Exported]:
    """Writes a search to a new SQLite file of Optuna's: one study for each rung of successive halving.

    A trial is a candidate, its parameters are the knobs that exist for it, and its values are the objectives in the
    order of the report. Choices that are no number and no word are JSON. A candidate that made no model, failed or
    diverged is a failed trial, which names the reason.
    Raises `InputError` for a study without a search or without candidates, and for a file that exists or cannot be
    written.
    """
    study = store.study(study_id)
    if not study.spec.get("search"):
        raise InputError(f"study '{study.name}' has no search, and Optuna shows searches alone")
    space = Searching.model_validate(study.spec["search"])
    weighed = objectives_of(space, store, study_id)
    tried = candidates(study.spec, store, study_id)
    if not tried:
        raise InputError(f"study '{study.name}' has no candidates yet: platform study run {study.address}")
    if file.exists():
        raise InputError(f"{file}: exists; give the path of a new file")
    arms, rows = store.arms(study_id), store.trials(study_id)
    described = {each.number: each for each in points(store, study, weighed, tried, arms, rows)}
    directions = [StudyDirection.MAXIMIZE if each.maximize else StudyDirection.MINIMIZE for each in weighed]
    storage = optuna.storages.RDBStorage("sqlite://")  # in memory: Optuna would write each trial to the disk by itself
    written = []
    for rung, settings in enumerate(space.rungs):
        own = sorted((each for each in tried if each.rung == rung), key=lambda each: each.started_at)
        if own:
            name = ", ".join([study.address, *(f"{path} {value}" for path, value in settings.items())])
            made = optuna.create_study(storage=storage, study_name=name, directions=directions)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                made.set_metric_names([*map(str, weighed)])
            if None in described:  # the base, which is no candidate
                made.set_user_attr("base", _known(described[None].scores))
            trials = [_trial(each, described.get(each.number), space, [*map(str, weighed)]) for each in own]
            made.add_trials(trials)
            written.append(Exported(name, len(trials), sum(each.state == TrialState.COMPLETE for each in trials)))
    try:
        with closing(sqlite3.connect(file)) as out, closing(storage.engine.raw_connection()) as held:
            assert isinstance(held.driver_connection, sqlite3.Connection)
            held.driver_connection.backup(out)
    except sqlite3.Error as error:
        raise InputError(f"{file}: cannot be written: {error}") from error
    return written


def _known(scores: Mapping[str, float]) -> dict[str, float]:
    return {name: score for name, score in scores.items() if math.isfinite(score)}


def _trial(candidate: Found, point: Point | None, space: Searching, objectives: list[str]) -> FrozenTrial:
    """A candidate at one rung. point: what the report says of it; None where it made no model."""
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
    """A time as Optuna keeps it: that of this machine, without a zone."""
    return time.astimezone().replace(tzinfo=None)


def distribution(knob: Search) -> BaseDistribution:
    """The values of a knob as Optuna shows them; `suggest` draws some of them in another form.

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
    return json.dumps(value) if isinstance(value, list | dict) else value
