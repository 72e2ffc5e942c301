"""What a search found, which settings mattered, and what random search found beside it: from the ledger alone."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from deltalab.errors import InputError
from deltalab.store import Arm, Store, Study, TrialRow
from deltalab.study.answers.importance import FEWEST, Importance, importance
from deltalab.study.answers.random_control import Control, compare, worst_of
from deltalab.study.answers.recorded_scores import Measured, current
from deltalab.study.planning.tuning_candidates import called
from deltalab.study.searching.phase import Found, at_chance, candidates, halvings, point, scores
from deltalab.study.specs.budget import COSTS, Objective, Searching
from deltalab.study.specs.method_settings import setting
from deltalab.study.statistics.pareto import front


@dataclass(frozen=True)
class Point:
    """A candidate that trained, or the base.

    name: its arm, if it is a finalist or the base, else `candidate 7` of number 7, `random candidate 2` of random
    search, `warm candidate 0` of those that the study names. scores: by objective, on validation, at the last
    fidelity that it trained at; those of the base with its tuned values. values: where it differs from the base.
    rung: that fidelity, from 0. on_front: no other candidate of the last fidelity beats it in all objectives, and it is
    not at_chance: a candidate that is better than chance on none of the tasks. The base is never said to be.
    settings: all that the search chose for it; of the base, its own values that the space holds too. first: its scores
    at the lowest fidelity, which all candidates have; those of the base are known only where there is no other.
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
        return "candidate " not in self.name


@dataclass(frozen=True)
class Reason:
    """Why candidates are infeasible. reason, example: of the first of them, and its values."""

    reason: str
    count: int
    example: dict[str, Any]


@dataclass(frozen=True)
class Discovery:
    """A search in figures.

    objectives: name -> whether more is better. drawn: how many candidates trained, by who drew them.
    importances: metric or `decode_us` -> what each setting explains of it; empty while the study runs. unknown:
    settings that too few candidates have. control: None where random search drew nothing. Both are of the scores at
    the lowest fidelity, which all candidates have; fidelity: its settings. dropped: a sentence on each fidelity but the
    last. left_off: candidates that would be on the front but for being better than chance on none of the tasks.
    learned: of each metric with a chance level, how many candidates are past half way from it to the best of them, at
    the lowest fidelity.
    """

    objectives: dict[str, bool]
    drawn: dict[str, int]
    candidates: list[Point]
    importances: dict[str, list[Importance]]
    unknown: list[str]
    control: Control | None
    fidelity: dict[str, int]
    dropped: list[str]
    infeasible: list[Reason]
    left_off: int = 0
    learned: dict[str, int] = field(default_factory=dict)


def discovery(store: Store, study: Study, arms: Sequence[Arm], trials: list[TrialRow]) -> Discovery:
    """What a study's search has found so far."""
    space = Searching.model_validate(study.spec["search"])
    tasks = study.provenance["tasks"]
    weighed = space.weighed({task: (about["metric"], about["maximize"]) for task, about in tasks.items()})
    found = candidates(study.spec, store, study.id)
    first = [each for each in found if each.infeasible is None and each.rung == 0]
    chance = chances(weighed, tasks)
    shown = points(store, study, weighed, found, arms, trials)
    ended = [each for each in shown if each.rung == len(space.rungs) - 1]
    knobs = [space.drawn(each.values) or dict(each.values) for each in first]
    held = Counter(path for values in knobs for path in values)
    importances = {}
    if study.state != "running":  # it takes seconds, and another candidate ends before they have passed
        logarithmic = frozenset(path for path, knob in space.knobs.items() if knob.log_uniform)
        for metric in (str(one) for one in weighed if one.name not in COSTS or one.name == "decode_us"):
            # A diverged run says as much about its region as one that learned nothing. It has no time of a token.
            reached = [each.scores[metric] for each in first]
            known = [chance.get(metric, math.nan) if math.isnan(score) else score for score in reached]
            kept = [n for n, score in enumerate(known) if not math.isnan(score)]
            told = _importance(json.dumps([knobs[n] for n in kept]), tuple(known[n] for n in kept), logarithmic)
            importances[metric] = told
    return Discovery(
        objectives={str(one): one.maximize for one in weighed},
        drawn=dict(Counter(each.drawn_by for each in first)),
        candidates=shown,
        importances=importances,
        unknown=[path for path in space.knobs if held[path] < FEWEST],
        control=_control(weighed, first, chance),
        fidelity=space.rungs[0],
        dropped=[str(each) for each in halvings(study.spec, store, study.id)],
        infeasible=_reasons(found),
        left_off=sum(ended[at].at_chance for at in front([point(weighed, each.scores) for each in ended])),
        learned={
            name: _half_way([each.scores[name] for each in first], chance[name], one.maximize)
            for one in weighed
            if (name := str(one)) in chance
        },
    )


def _half_way(scores: Sequence[float], chance: float, maximize: bool) -> int:
    """How many scores are past half way from chance to the best one; none where no score is better than chance."""
    gains = [score - chance if maximize else chance - score for score in scores if not math.isnan(score)]
    best = max(gains, default=0.0)
    return sum(0 < best <= 2 * gain for gain in gains)


def chances(weighed: Sequence[Objective], tasks: Mapping[str, Any]) -> dict[str, float]:
    """The chance level of each metric whose task has one. tasks: as the ledger has them.

    >>> one = Objective("accuracy", "mqar", True)
    >>> chances([one], {"mqar": {"chance": 0.5}}), chances([one], {"mqar": {"chance": None}})
    ({'accuracy@mqar': 0.5}, {})
    """
    known = {str(one): tasks[one.task].get("chance") for one in weighed if one.task and one.name not in COSTS}
    return {name: float(level) for name, level in known.items() if level is not None}


@lru_cache(maxsize=16)
def _importance(knobs: str, scores: tuple[float, ...], logarithmic: frozenset[str]) -> list[Importance]:
    """`importance`, once for each study that a process shows. knobs: JSON."""
    return importance(json.loads(knobs), scores, logarithmic)


def _control(weighed: Sequence[Objective], first: Sequence[Found], chance: Mapping[str, float]) -> Control | None:
    sides: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for each in first:
        sides[each.drawn_by == "random"].append(tuple(point(weighed, each.scores)))
    if not all(sides.values()):
        return None
    worst = tuple(worst_of(chance.get(str(one), math.nan), one.maximize) for one in weighed)
    return _compared(tuple(sides[False]), tuple(sides[True]), worst)


_compared = lru_cache(maxsize=16)(compare)


def points(
    store: Store,
    study: Study,
    weighed: Sequence[Objective],
    found: Sequence[Found],
    arms: Sequence[Arm],
    trials: list[TrialRow],
) -> list[Point]:
    """The base, the finalists in the order of their arms, the rest of the front, all others by the first objective."""
    space, base = Searching.model_validate(study.spec["search"]), next(arm for arm in arms if arm.is_base)
    chance = chances(weighed, study.provenance["tasks"])
    configs = {trial.number: (trial.task, trial.config) for trial in trials if trial.stage == "tune"}
    # The first training that a finalist tries is the candidate's own; in old ledgers it is no confirmation.
    confirmed: dict[str, dict[str, Any]] = {}
    for trial in sorted(current(trials), key=lambda trial: trial.stage == "confirm"):
        if trial.arm != base.name and (trial.stage == "tune" or trial.number == 0):
            confirmed.setdefault(trial.arm, trial.values)
    best = _tuned(store, study, arms, trials)
    tuned = [trial.values for trial in best.values()]
    first = {each.number: each.scores for each in found if each.rung == 0}
    names: dict[str, str] = {}
    for arm in arms:
        if arm.name in confirmed and not arm.is_base:
            names.setdefault(_same(confirmed[arm.name]), arm.name)
    every = _base(store, space, weighed, base, best) + [
        Point(
            name=names.get(_same(each.values)) or called(base.name, "tune", each.number, space.trials),
            number=each.number,
            drawn_by=each.drawn_by,
            rung=each.rung,
            scores=each.scores,
            values=changed(base.config[configs[each.number][0]], configs[each.number][1], tuned, each.values),
            settings=dict(each.values),
            first=first.get(each.number, {}),
            at_chance=at_chance(weighed, each.scores, chance),
        )
        # Rungs are in order, and the last one counts.
        for each in {each.number: each for each in found if each.infeasible is None}.values()
    ]
    # The cheapest model is on a front even where it has learned nothing. That is no finding.
    ended = [at for at, each in enumerate(every) if each.rung == len(space.rungs) - 1 and not each.at_chance]
    for at in front([point(weighed, every[at].scores) for at in ended]) if ended else ():
        every[ended[at]] = replace(every[ended[at]], on_front=True)
    ranks = {arm.name: rank for rank, arm in enumerate(arms)}
    main = weighed[0]

    def place(each: Point) -> tuple[int, bool, float]:
        (score,) = point([main], each.scores)
        return ranks.get(each.name, len(ranks)), not each.on_front, math.inf if math.isnan(score) else score

    return sorted(every, key=place)


def _tuned(store: Store, study: Study, arms: Sequence[Arm], trials: list[TrialRow]) -> dict[str, TrialRow]:
    """The base's trial with the training that is best on validation over the seeds of confirmation, by task."""
    ledger, base = Measured(store, study.id, trials, study.spec), next(arm.name for arm in arms if arm.is_base)
    found: dict[str, TrialRow] = {}
    for task, about in study.provenance["tasks"].items():
        best = ledger.scores(task, about, arms).shown(base)
        for trial in ledger.of(base, task):
            if trial.number == best:
                found.setdefault(task, trial)
    return found


def _base(
    store: Store, space: Searching, weighed: Sequence[Objective], base: Arm, best: Mapping[str, TrialRow]
) -> list[Point]:
    """The base with its best training on each task; nothing before it has one."""
    if best.keys() != base.config.keys():
        return []
    known = store.known_trials(trial.key for trial in best.values())
    reached = scores(weighed, {task: known[trial.key] for task, trial in best.items()})
    last = len(space.rungs) - 1
    settings = _settings_of_base(space, base, next(iter(best.values())).values)
    return [Point(base.name, None, "tuning", last, reached, {}, settings=settings, first={} if last else reached)]


def _settings_of_base(space: Searching, base: Arm, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """The base's own values that the space holds too. tuned: on its first task."""
    config = next(iter(base.config.values()))
    found: dict[str, Any] = dict(tuned)
    for path, search in space.searched.items():
        if path not in tuned:
            with suppress(InputError):  # a knob that the base's rule does not have
                own = config["rule"]["name"] if path == "rule" else setting(config, path, base.name)
                if search.pattern is None and search.holds(own):
                    found[path] = own
    return found


def changed(
    base: Mapping[str, Any], config: Mapping[str, Any], tuned: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that differ from the base's.

    base, config: the configurations of the base and of the candidate, every setting spelled out, so that two spellings
    of a gate are one. tuned: the base's tuned values on each task.

    >>> base = {"rule": {"name": "gla", "beta": {"const": {"value": 1}}}, "train": {"lr": 0.1}}
    >>> changed(base, base, [{"train.lr": 0.2}], {"rule": "gla", "rule.beta": 1, "train.lr": 0.1})
    {'train.lr': 0.1}
    """
    found = {}
    for path, value in values.items():
        if any(path in own for own in tuned):
            same = all(own.get(path) == value for own in tuned)
        elif path == "rule":
            same = base["rule"] == config["rule"]
        else:
            try:
                same = setting(base, path, "base") == setting(config, path, "candidate")
            except InputError:  # a knob that the base's rule does not have
                same = False
        if not same:
            found[path] = value
    return found


def _same(values: Mapping[str, Any]) -> str:
    return json.dumps(values, sort_keys=True)


def _reasons(found: Sequence[Found]) -> list[Reason]:
    """The reasons of infeasible candidates, the most frequent first; those that differ in numbers alone are one."""
    groups: dict[str, list[tuple[str, Found]]] = {}
    for each in found:
        if each.infeasible is not None:
            reason, _, _ = each.infeasible.partition("; ")  # what follows is advice
            groups.setdefault(re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", reason), []).append((reason, each))
    reasons = [Reason(own[0][0], len(own), dict(own[0][1].values)) for own in groups.values()]
    return sorted(reasons, key=lambda each: -each.count)
