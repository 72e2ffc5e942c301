"""Computes how much of the variance of the candidates' scores each searched setting explains, by fANOVA."""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any

import numpy as np

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
    spaces: dict[str, tuple[float, float]] = {}
    for path, values in columns.items():
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            numbers = [math.log(value) if path in logarithmic else float(value) for value in values]
            space = min(numbers), max(numbers)
        else:
            numbers = _ordered([json.dumps(value, sort_keys=True) for value in values], scores)
            most_choices = max(most_choices, len(set(numbers)))
            space = 0.0, len(set(numbers)) - 1.0
        if len(set(numbers)) > 1:
            params[path], spaces[path] = numbers, space
    if not params or len(set(scores)) == 1:
        return {}
    draws = [
        f"{int.from_bytes(hashlib.sha256(str(n).encode()).digest()[:4]) % most_choices}" for n in range(len(scores))
    ]
    params[NOTHING], spaces[NOTHING] = _ordered(draws, scores), (0.0, len(set(draws)) - 1.0)
    paths = sorted(params)
    trees = _trees(np.array([params[path] for path in paths]).T, np.array(scores), np.array([*map(spaces.get, paths)]))
    return dict(zip(paths, trees.T.tolist(), strict=True))


def _trees(candidates: np.ndarray, scores: np.ndarray, space: np.ndarray) -> np.ndarray:
    """The share of the variance that each column explains alone, in each of `TREES` trees.

    A tree that is constant says nothing, and is left out. Optuna's `FanovaImportanceEvaluator`, with one tree and the
    tree's number as its seed, grows the same trees and finds the same shares in twenty times the time.

    Args:
        candidates: The number of each candidate in each column [N, P].
        scores: The score of each candidate [N].
        space: The low and the high end of each column [P, 2].

    Returns:
        The shares [trees, P].
    """
    from sklearn.tree import DecisionTreeRegressor  # Loading scikit-learn takes half a second.

    candidates = candidates.astype(np.float32)  # The type of a tree's thresholds.
    shares = []
    for number in range(TREES):
        seed = np.random.RandomState(number).randint(np.iinfo(np.int32).max)
        resample = np.random.RandomState(seed).randint(0, len(scores), len(scores))
        counts = np.bincount(resample, minlength=len(scores)).astype(float)
        tree = DecisionTreeRegressor(max_depth=DEPTH, random_state=seed)
        tree.fit(candidates, scores, sample_weight=counts, check_input=False)
        if (of_tree := _explained(tree.tree_, space)) is not None:
            shares.append(of_tree)
    return np.array(shares)


def _explained(tree: Any, space: np.ndarray) -> np.ndarray | None:
    """The share of a tree's variance over the `space` [P, 2] that each column explains alone [P]; None without any."""
    boxes = {0: (space[:, 0], space[:, 1])}  # The box of each node. A node's children come after it.
    leaves = []
    for node, (column, cut) in enumerate(zip(tree.feature, tree.threshold, strict=True)):
        low, high = boxes[node]
        if column < 0:
            leaves.append(node)
            continue
        below, above = high.copy(), low.copy()
        below[column] = above[column] = cut
        boxes[tree.children_left[node]], boxes[tree.children_right[node]] = (low, below), (above, high)
    lows, highs = (np.array([boxes[leaf][end] for leaf in leaves]) for end in (0, 1))
    values = tree.value[leaves, 0, 0]
    parts = (highs - lows) / (space[:, 1] - space[:, 0])
    volumes = parts.prod(axis=1)
    mean = volumes @ values
    variance = volumes @ (values - mean) ** 2
    if variance <= 0:
        return None
    explained = []
    for column in range(len(space)):
        ends = np.unique([lows[:, column], highs[:, column]])
        inside = (lows[:, column, None] <= ends[:-1]) & (highs[:, column, None] >= ends[1:])
        marginal = (values * volumes / parts[:, column]) @ inside
        explained.append(np.diff(ends) / (ends[-1] - ends[0]) @ (marginal - mean) ** 2)
    shares: np.ndarray = np.array(explained) / variance
    return shares


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
