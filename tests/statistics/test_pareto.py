"""The hypervolume and what points add to it."""

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltalab.statistics.pareto import beyond_worst, contributions, front, greedy_choice, hypervolume, ranked


def by_inclusion_and_exclusion(points: Any, reference: Any) -> float:
    """The volume of a union of boxes: those of one, less those of two, and so on."""
    total = 0.0
    for size in range(1, len(points) + 1):
        for some in combinations(points, size):
            sides = np.maximum(np.asarray(reference) - np.max(some, axis=0), 0)
            total -= (-1) ** size * float(sides.prod())
    return total


@pytest.mark.parametrize("objectives", [1, 2, 3, 4, 5])
def test_hypervolume_is_that_of_the_union_of_boxes(objectives: int) -> None:
    draw = np.random.default_rng(objectives)
    points = draw.random((8, objectives)) * 1.2
    reference = [1.0] * objectives
    expected = by_inclusion_and_exclusion(points, reference)
    assert hypervolume(points, reference) == pytest.approx(expected, rel=1e-12)
    assert hypervolume([*points, *points[:3]], reference) == pytest.approx(expected, rel=1e-12)
    assert hypervolume([*points, [math.nan] * objectives], reference) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("objectives", [2, 3, 4])
def test_a_contribution_is_what_is_lost_without_the_point(objectives: int) -> None:
    points = np.random.default_rng(objectives).random((9, objectives))
    reference = [1.1] * objectives
    whole = hypervolume(points, reference)
    lost = [whole - hypervolume(np.delete(points, i, axis=0), reference) for i in range(len(points))]
    assert contributions(points, reference) == pytest.approx(lost, abs=1e-12)
    assert {i for i, each in enumerate(lost) if each > 1e-12} <= set(front(points))


def test_chosen_points_dominate_nearly_as_much_as_the_best_subset_could() -> None:
    points = np.random.default_rng(0).random((14, 3))
    reference = beyond_worst(points)
    best = max(hypervolume(points[list(some)], reference) for some in combinations(range(14), 4))
    found = greedy_choice(points, reference, 4)
    assert len(set(found)) == 4
    assert hypervolume(points[found], reference) >= 0.95 * best


NUMBERS = st.sampled_from([0.0, 1.0, 2.0, 3.0, math.inf, -math.inf, math.nan])


@given(st.integers(1, 4).flatmap(lambda objectives: st.lists(st.tuples(*[NUMBERS] * objectives), max_size=12)))
def test_the_front_is_what_no_point_dominates(points: list[tuple[float, ...]]) -> None:
    def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(a <= b for a, b in zip(one, other, strict=True))

    whole = [point for point in points if not any(map(math.isnan, point))]
    assert front(points) == [
        i for i, point in enumerate(points) if point in whole and not any(dominates(other, point) for other in whole)
    ]


def test_ranks_go_front_by_front_and_points_without_a_result_come_last() -> None:
    points = [(2.0, 2.0), (1.0, 1.0), (math.nan, 0.0), (0.0, 3.0), (3.0, 3.0)]
    order = ranked(points, beyond_worst(points), 5)
    assert set(order[:2]) == {1, 3}
    assert order[2:] == [0, 4, 2]
    for most in range(5):
        assert ranked(points, beyond_worst(points), most)[:most] == order[:most]


def test_without_points_nothing_is_on_the_front_and_nothing_is_dominated() -> None:
    assert front([]) == greedy_choice([], (), 3) == contributions([], ()) == ranked([], (), 1) == []
    assert beyond_worst([]) == ()
    assert hypervolume([], (1.0, 2.0)) == 0
