"""The hypervolumes of a search and of random search, at equal numbers of candidates."""

import math

import numpy as np
import pytest

from deltalab.statistics.pareto import hypervolume
from deltalab.study.answers.random_control import compare_with_random, worst_of

NO_CHANCE = [math.inf] * 3
Points = list[list[float]]


def drawn(count: int, seed: int) -> Points:
    return np.random.default_rng(seed).random((count, 3)).tolist()  # type: ignore[no-any-return]


def test_two_random_searches_are_not_told_apart() -> None:
    control = compare_with_random(drawn(52, 1), drawn(13, 2), NO_CHANCE)
    assert (control.n, control.of) == (13, 52)
    assert control.difference.low < 0 < control.difference.high
    assert control.searched < control.all_searched, "13 candidates are fewer than 52"
    assert {name: len(values) for name, values in control.by_number.items()} == {"searched": 52, "random": 13}


def test_a_search_that_draws_better_candidates_is_told_from_random_search() -> None:
    better = [[value**4 for value in point] for point in drawn(52, 1)]
    control = compare_with_random(better, drawn(13, 2), NO_CHANCE)
    assert control.difference.low > 0
    assert control.searched - control.random == pytest.approx(control.difference.mean)


def test_the_hypervolume_is_that_of_the_box_of_all_candidates() -> None:
    points = drawn(20, 3)
    control = compare_with_random(points, points, NO_CHANCE)
    best, worst = np.min(points, axis=0), np.max(points, axis=0)
    exact = hypervolume((np.array(points) - best) / (worst - best), [1.0] * 3)
    assert control.searched == pytest.approx(exact, abs=0.01)
    assert control.difference.mean == 0


def test_no_value_counts_as_worse_than_chance() -> None:
    """Else one candidate that is far worse than chance makes all others look alike."""
    points = [[0.1, 1.0], [0.5, 0.0], [1.0, 0.5]]
    without = compare_with_random(points, points, [1.0, math.inf])
    outlier = compare_with_random([*points, [90.0, 1.0]], points, [1.0, math.inf])
    assert outlier.random == pytest.approx(without.random)


def test_diverged_candidates_add_nothing() -> None:
    points = drawn(10, 4)
    control = compare_with_random([[math.nan, 0.0, 0.0], *points], points, NO_CHANCE)
    assert control.by_number["searched"][0] == 0
    assert control.all_searched == control.random
    with pytest.raises(ValueError, match="both need a candidate"):
        compare_with_random([], points, NO_CHANCE)


def test_chance_as_a_coordinate() -> None:
    assert worst_of(math.nan, True) == math.inf
