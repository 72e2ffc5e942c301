"""Computes how much of the variance of the candidates' scores each searched setting explains, by Optuna's fANOVA."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.importance import FanovaImportanceEvaluator

TREES = 32
"""How many trees a forest has. Each is grown on its own resample of the candidates, so the trees give the interval."""
DEPTH = 6
"""How deep a tree grows."""
FEWEST = 20
"""The fewest candidates on which a forest is grown. With fewer, its shares are meaningless."""
MOST = 1000
"""The most candidates on which a forest is grown. If a search has more, a selection spread over the search is used."""
METHOD = 1
"""The version of the method. Raise it with every change of an importance: the ledger keeps those computed before."""
NOTHING = "(nothing)"
"""A made-up setting, drawn at random and never used. Its share is what a setting without effect gets."""


@dataclass(frozen=True)
class Importance:
    """The share of the variance of a score that one setting explains alone, averaged over all other settings.

    Attributes:
        path: The path of the setting.
        share: The mean of the share over the trees of the forest.
        low: The lower bound of the middle 95% of the trees' shares.
        high: The upper bound of the middle 95% of the trees' shares.
        among: How many candidates have the setting. A setting that depends on another one is missing in some
            candidates; its share is of the variance among the candidates that have it.
    """

    path: str
    share: float
    low: float
    high: float
    among: int


def importance(
    candidates: Sequence[Mapping[str, Any]], scores: Sequence[float], logarithmic: frozenset[str] = frozenset()
) -> list[Importance]:
    """Returns the importance of every setting for a score; the last entry is the importance of `NOTHING`.

    fANOVA fits a random forest to the scores and splits the forest's variance over the whole space into the shares of
    the settings. The trees are grown on bootstrap resamples of the candidates; the spread of a share over the trees is
    its interval. One tree varies more than a forest, so the interval is wide rather than narrow.

    If only some candidates have a setting, its share comes from another forest, grown on these candidates alone. A
    setting that fewer than `FEWEST` candidates have, or that has one value, is left out.

    Args:
        candidates: The settings of each candidate by path; a setting that a candidate does not have is left out.
        scores: The score of each candidate, finite.
        logarithmic: The paths of positive numbers that are drawn evenly on a logarithmic scale.

    References:
        Hutter et al. 2014, An Efficient Approach for Assessing Hyperparameter Importance.
    """
    stride = math.ceil(len(candidates) / MOST) or 1
    candidates, scores = candidates[::stride], scores[::stride]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, values in enumerate(candidates):
        for path in values:
            holders[path].append(number)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for path, numbers_with_path in holders.items():
        groups[tuple(numbers_with_path)].append(path)
    importances: list[Importance] = []
    everyone = tuple(range(len(candidates)))
    for numbers, paths in sorted(groups.items(), key=lambda group: -len(group[0])):
        if len(numbers) < FEWEST:
            continue
        columns = {
            path: [candidates[n][path] for n in numbers]
            for path, numbers_with_path in holders.items()
            if set(numbers) <= set(numbers_with_path)
        }
        shares = _shares(columns, [scores[n] for n in numbers], logarithmic)
        wanted = [*paths, NOTHING] if numbers == everyone else paths
        of_group = [Importance(path, *_interval(shares[path]), len(numbers)) for path in wanted if path in shares]
        importances += sorted(of_group, key=lambda setting: -setting.share)
    return sorted(importances, key=lambda setting: setting.path == NOTHING)


def _shares(
    columns: Mapping[str, list[Any]], scores: list[float], logarithmic: frozenset[str]
) -> dict[str, list[float]]:
    """The share of the variance that each column explains, in each tree. A column with a single value is left out."""
    most_choices = 2
    params: dict[str, list[float]] = {}
    spaces: dict[str, BaseDistribution] = {}
    for path, values in columns.items():
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = [math.log(value) if path in logarithmic else float(value) for value in values]
            space: BaseDistribution = FloatDistribution(min(numbers), max(numbers))
        else:
            numbers = _ordered([json.dumps(value, sort_keys=True) for value in values], scores)
            most_choices = max(most_choices, len(set(numbers)))
            space = IntDistribution(0, len(set(numbers)) - 1)
        if len(set(numbers)) > 1:
            params[path], spaces[path] = numbers, space
    if not params or len(set(scores)) == 1:
        return {}
    draws = [
        f"{int.from_bytes(hashlib.sha256(str(n).encode()).digest()[:4]) % most_choices}" for n in range(len(scores))
    ]
    params[NOTHING], spaces[NOTHING] = _ordered(draws, scores), IntDistribution(0, most_choices - 1)
    study = optuna.create_study()
    for number, score in enumerate(scores):
        candidate = {path: numbers[number] for path, numbers in params.items()}
        study.add_trial(optuna.trial.create_trial(params=candidate, distributions=spaces, value=score))
    trees = [FanovaImportanceEvaluator(n_trees=1, max_depth=DEPTH, seed=tree).evaluate(study) for tree in range(TREES)]
    return {path: [float(tree[path]) for tree in trees] for path in params}


def _ordered(names: list[str], scores: list[float]) -> list[float]:
    """Each choice as a number: its place when the choices are sorted by their mean score.

    A tree that splits these numbers at a threshold finds the best of all splits of the choices into two subsets
    (Breiman et al. 1984, section 4.2.2). So one column of numbers is enough for all choices.

    Examples:
        >>> _ordered(["a", "b", "a", "c"], [0.9, 0.1, 0.7, 0.5])
        [2, 0, 2, 1]
    """
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, score in zip(names, scores, strict=True):
        by_name[name].append(score)
    order = sorted(by_name, key=lambda name: (fmean(by_name[name]), name))
    places = {name: place for place, name in enumerate(order)}
    return [places[name] for name in names]


def _interval(shares: list[float]) -> tuple[float, float, float]:
    """The mean of the trees' shares, and the bounds of their middle 95%."""
    ends = quantiles(shares, n=40, method="inclusive")
    return fmean(shares), ends[0], ends[-1]
