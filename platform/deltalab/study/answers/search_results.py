"""Reads from the ledger the findings of a search: its candidates, which settings matter, and its control."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

from deltalab.errors import InputError
from deltalab.statistics.pareto import front
from deltalab.store import Arm, Store, Study, TrialRow
from deltalab.store.studies.importances import keep_shares, kept_shares
from deltalab.study.answers.importance import FEWEST, METHOD, Importance, importance
from deltalab.study.answers.random_control import Control, compare_with_random, worst_of
from deltalab.study.answers.search_points import Point, chance_levels, points
from deltalab.study.searching.results import CandidateResult, candidate_results, halvings, objective_point
from deltalab.study.specs.recorded_study import RecordedSpec, recorded_tasks
from deltalab.study.specs.sections.budget import COSTS, Objective, Searching
from deltalab.study.specs.sections.search_space import example_with


@dataclass(frozen=True)
class Reason:
    """A reason that candidates are infeasible.

    Attributes:
        reason: The reason as the first of the candidates states it.
        count: How many candidates have this reason. Numbers in the text may differ.
        example: The values of the first of the candidates.
    """

    reason: str
    count: int
    example: dict[str, Any]


@dataclass(frozen=True)
class TriedRule:
    """What a search tried of a rule.

    Attributes:
        rule: The rule, as the space has it.
        candidates: How many candidates with the rule trained.
        random: How many of them the control drew.
        best: Each task's metric -> the best score of these candidates; NaN if none has a score.
        never: Another knob -> the choices of it that none of these candidates has, of knobs that the rule may have.
    """

    rule: Any
    candidates: int
    random: int
    best: dict[str, float]
    never: dict[str, list[Any]]


@dataclass(frozen=True)
class Discovery:
    """The findings of a search.

    `importances`, `control`, `learned` and `rules` use the scores at the lowest fidelity, which all candidates have.

    Attributes:
        objectives: The name of each objective -> whether more is better.
        drawn: How many candidates trained, by the method that drew them.
        candidates: The base and the candidates.
        importances: A metric or `decode_us` -> the share of its variance that each setting explains; empty while the
            study runs, and where nobody asked for them.
        unknown: The settings that too few candidates have for an importance.
        control: The comparison of the search with random search; None if random search drew nothing.
        fidelity: The settings of the lowest fidelity.
        dropped: For each fidelity but the last, a sentence about the candidates that were dropped at it.
        infeasible: The reasons that candidates make no model, the most frequent reason first.
        left_off: How many candidates would be on the front if they were better than chance on any task.
        learned: A metric with a chance level -> how many candidates are more than half way from chance to the
            best candidate.
        rules: What was tried of each rule, if the space has several.
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
    rules: list[TriedRule] = field(default_factory=list)


def discovery(
    store: Store, study: Study, arms: Sequence[Arm], trials: list[TrialRow], *, importances: bool = True
) -> Discovery:
    """Returns the findings of a study's search so far.

    Args:
        store: The ledger.
        study: A study with a search.
        arms: The arms of the study, in order.
        trials: All trials of the study.
        importances: Whether to find the importances.
    """
    space, tasks = RecordedSpec(study.spec).search, recorded_tasks(study)
    objectives = space.weighed({name: (task.metric, task.maximize) for name, task in tasks.items()})
    results = candidate_results(study.spec, store, study.id)
    first = [result for result in results if result.infeasible is None and result.rung == 0]
    chance = chance_levels(objectives, tasks)
    candidates = points(store, study, objectives, results, arms, trials)
    last_rung = [point for point in candidates if point.rung == len(space.rungs) - 1]
    unbeaten = front([objective_point(objectives, point.scores) for point in last_rung])
    knobs = [space.drawn(result.values) or dict(result.values) for result in first]
    holders = Counter(path for values in knobs for path in values)
    return Discovery(
        objectives={str(objective): objective.maximize for objective in objectives},
        drawn=dict(Counter(result.drawn_by for result in first)),
        candidates=candidates,
        # A forest takes seconds, and while the study runs, another candidate ends before they have passed.
        importances=_importances(store, study, space, objectives, first, knobs)
        if importances and study.state != "running"
        else {},
        unknown=[path for path in space.knobs if holders[path] < FEWEST],
        control=_control(objectives, first, chance),
        fidelity=space.rungs[0],
        dropped=[str(halving) for halving in halvings(study.spec, store, study.id, results)],
        infeasible=_reasons(results),
        left_off=sum(last_rung[place].at_chance for place in unbeaten),
        learned={
            name: _past_half_way([result.scores[name] for result in first], chance[name], objective.maximize)
            for objective in objectives
            if (name := str(objective)) in chance
        },
        rules=_tried_rules(space, objectives, first, knobs),
    )


def _importances(
    store: Store,
    study: Study,
    space: Searching,
    objectives: Sequence[Objective],
    first: Sequence[CandidateResult],
    knobs: Sequence[Mapping[str, Any]],
) -> dict[str, list[Importance]]:
    """The importances of the settings for each metric and `decode_us`, from each candidate's `first` and `knobs`.

    They are kept in the ledger, and computed anew once a study has other results.
    """
    logarithmic = frozenset(path for path, knob in space.knobs.items() if knob.log_uniform)
    chance = chance_levels(objectives, recorded_tasks(study))
    importances = {}
    for objective in objectives:
        if objective.name in COSTS and objective.name != "decode_us":
            continue
        metric = str(objective)
        # A diverged run says as much about its region as one that learned nothing. It has no time of a token.
        level = chance.get(metric, math.nan)
        scores = [level if math.isnan(result.scores[metric]) else result.scores[metric] for result in first]
        known = [n for n, score in enumerate(scores) if not math.isnan(score)]
        given = [knobs[n] for n in known], [scores[n] for n in known]
        computed_from = hashlib.sha256(json.dumps([*given, sorted(logarithmic), METHOD]).encode()).hexdigest()
        shares = kept_shares(store, study.id, metric, computed_from)
        if shares is None:
            shares = [asdict(setting) for setting in importance(*given, logarithmic)]
            with suppress(InputError):  # Whoever may not write the ledger computes them every time.
                keep_shares(store, study.id, metric, computed_from, shares)
        importances[metric] = [Importance(**setting) for setting in shares]
    return importances


def _tried_rules(
    space: Searching,
    objectives: Sequence[Objective],
    first: Sequence[CandidateResult],
    knobs: Sequence[Mapping[str, Any]],
) -> list[TriedRule]:
    """What was tried of each rule, by each candidate's `first` and `knobs`; [] if the rule is not searched."""
    tried = []
    for rule in space.knobs["rule"].extremes if "rule" in space.knobs else ():
        own = [n for n, values in enumerate(knobs) if json.dumps(values.get("rule")) == json.dumps(rule)]
        alone = {**space.knobs, "rule": space.knobs["rule"].model_copy(update={"choice": (rule,)})}
        never = {}
        for name, knob in space.knobs.items():
            if name == "rule" or knob.choice is None or example_with(alone, name) is None:
                continue
            drawn = {json.dumps(knobs[n][name]) for n in own if name in knobs[n]}
            if missing := [value for value in knob.choice if json.dumps(value) not in drawn]:
                never[name] = missing
        best = {}
        for objective in objectives:
            if objective.name not in COSTS:
                scores = [first[n].scores[str(objective)] for n in own]
                known = [score for score in scores if not math.isnan(score)]
                best[str(objective)] = (max if objective.maximize else min)(known, default=math.nan)
        tried.append(TriedRule(rule, len(own), sum(first[n].drawn_by == "random" for n in own), best, never))
    return tried


def _control(
    objectives: Sequence[Objective], first: Sequence[CandidateResult], chance: Mapping[str, float]
) -> Control | None:
    """The comparison of the search with random search; None if either has no candidate."""
    sides: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for result in first:
        sides[result.drawn_by == "random"].append(tuple(objective_point(objectives, result.scores)))
    if not all(sides.values()):
        return None
    limits = tuple(worst_of(chance.get(str(objective), math.nan), objective.maximize) for objective in objectives)
    return _compare_once(tuple(sides[False]), tuple(sides[True]), limits)


_compare_once = lru_cache(maxsize=16)(compare_with_random)


def _past_half_way(scores: Sequence[float], chance: float, maximize: bool) -> int:
    """How many scores are more than half way from chance to the best score; 0 if no score is better than chance."""
    gains = [score - chance if maximize else chance - score for score in scores if not math.isnan(score)]
    best = max(gains, default=0.0)
    return sum(0 < best <= 2 * gain for gain in gains)


def _reasons(results: Sequence[CandidateResult]) -> list[Reason]:
    """The reasons of infeasible candidates, the most frequent first. Reasons that differ only in numbers are merged."""
    groups: dict[str, list[tuple[str, CandidateResult]]] = {}
    for result in results:
        if result.infeasible is not None:
            reason, _, _ = result.infeasible.partition("; ")  # the text after "; " is advice
            groups.setdefault(re.sub(r"\d[\d.,]*(e[+-]?\d+)?", "#", reason), []).append((reason, result))
    reasons = [Reason(group[0][0], len(group), dict(group[0][1].values)) for group in groups.values()]
    return sorted(reasons, key=lambda reason: -reason.count)
