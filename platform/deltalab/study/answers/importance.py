"""How much of the candidates' scores each searched setting explains: fANOVA, by Optuna."""

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
"""Trees of the forest. Each is grown on its own resample of the candidates, so they also give the interval."""
DEPTH = 6
FEWEST = 20
"""Candidates with which a forest says anything at all."""
MOST = 1000
"""Candidates that a forest is grown on. Of more, as many are taken, spread over the search."""
NOTHING = "(nothing)"
"""A setting that is drawn at random and never used: what a setting without effect is given."""


@dataclass(frozen=True)
class Importance:
    """The share of the variance of a score that one setting explains alone, averaged over all other settings.

    share: the mean over the forest's trees. low, high: 95% of the trees lie between them.
    among: candidates that have the setting. It is fewer than all of them where the setting depends on another; the
    share is then of the variance among these.
    """

    path: str
    share: float
    low: float
    high: float
    among: int


def importance(
    candidates: Sequence[Mapping[str, Any]], scores: Sequence[float], logarithmic: frozenset[str] = frozenset()
) -> list[Importance]:
    """The importance of every setting for a score, and last that of `NOTHING`.

    candidates: path -> value; a setting that a candidate does not have is left out of it. scores: one each, finite.
    logarithmic: the paths of positive numbers that are drawn evenly on a logarithmic scale.

    fANOVA (Hutter et al. 2014) fits a random forest to the scores and splits the forest's variance over the whole
    space into the shares of the settings. The forest's trees are grown on bootstrap resamples of the candidates; the
    spread of a share over the trees is its interval. One tree varies more than a forest, so the interval is wide
    rather than narrow. Settings that only some candidates have are judged among those, by another forest.
    Settings that fewer than `FEWEST` candidates have, and those with one value, are left out.
    """
    every = math.ceil(len(candidates) / MOST) or 1
    candidates, scores = candidates[::every], scores[::every]
    holders: dict[str, list[int]] = defaultdict(list)
    for number, values in enumerate(candidates):
        for path in values:
            holders[path].append(number)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for path, own in holders.items():
        groups[tuple(own)].append(path)
    found: list[Importance] = []
    everyone = tuple(range(len(candidates)))
    for numbers, paths in sorted(groups.items(), key=lambda group: -len(group[0])):
        if len(numbers) < FEWEST:
            continue
        columns = {
            path: [candidates[n][path] for n in numbers] for path, own in holders.items() if set(numbers) <= set(own)
        }
        shares = _shares(columns, [scores[n] for n in numbers], logarithmic)
        wanted = [*paths, NOTHING] if numbers == everyone else paths
        told = [Importance(path, *_interval(shares[path]), len(numbers)) for path in wanted if path in shares]
        found += sorted(told, key=lambda each: -each.share)
    return sorted(found, key=lambda each: each.path == NOTHING)


def _shares(
    columns: Mapping[str, list[Any]], scores: list[float], logarithmic: frozenset[str]
) -> dict[str, list[float]]:
    """Each column's share of the variance, by tree; without the columns of one value."""
    most = 2
    params: dict[str, list[float]] = {}
    spaces: dict[str, BaseDistribution] = {}
    for path, values in columns.items():
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = [math.log(value) if path in logarithmic else float(value) for value in values]
            space: BaseDistribution = FloatDistribution(min(numbers), max(numbers))
        else:
            numbers = _ordered([json.dumps(value, sort_keys=True) for value in values], scores)
            most = max(most, len(set(numbers)))
            space = IntDistribution(0, len(set(numbers)) - 1)
        if len(set(numbers)) > 1:
            params[path], spaces[path] = numbers, space
    if not params or len(set(scores)) == 1:
        return {}
    drawn = [f"{int.from_bytes(hashlib.sha256(str(n).encode()).digest()[:4]) % most}" for n in range(len(scores))]
    params[NOTHING], spaces[NOTHING] = _ordered(drawn, scores), IntDistribution(0, most - 1)
    study = optuna.create_study()
    for number, score in enumerate(scores):
        own = {path: numbers[number] for path, numbers in params.items()}
        study.add_trial(optuna.trial.create_trial(params=own, distributions=spaces, value=score))
    trees = [FanovaImportanceEvaluator(n_trees=1, max_depth=DEPTH, seed=tree).evaluate(study) for tree in range(TREES)]
    return {path: [float(tree[path]) for tree in trees] for path in params}


def _ordered(names: list[str], scores: list[float]) -> list[float]:
    """Choices as numbers, in the order of their mean score.

    A tree splits them as well as any of their subsets (Breiman et al. 1984, section 4.2.2), and one column is enough.

    >>> _ordered(["a", "b", "a", "c"], [0.9, 0.1, 0.7, 0.5])
    [2, 0, 2, 1]
    """
    own: dict[str, list[float]] = defaultdict(list)
    for name, score in zip(names, scores, strict=True):
        own[name].append(score)
    order = {name: place for place, name in enumerate(sorted(own, key=lambda name: (fmean(own[name]), name)))}
    return [order[name] for name in names]


def _interval(shares: list[float]) -> tuple[float, float, float]:
    """The mean, and the bounds of the middle 95%."""
    ends = quantiles(shares, n=40, method="inclusive")
    return fmean(shares), ends[0], ends[-1]
