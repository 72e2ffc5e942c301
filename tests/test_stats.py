"""The statistics against hand-computed values, and against what must hold for any values."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from deltalab.study.stats import (
    Difference,
    holm,
    interaction,
    mean_interval,
    paired,
    seeds_needed,
    simultaneous_level,
    smallest_holm_p,
    smallest_p,
)

NAN = math.nan
values = st.floats(-100, 100, allow_nan=False, allow_subnormal=False)
pairs = st.lists(st.tuples(values, values), min_size=1, max_size=8)


def test_mean_interval_by_hand() -> None:
    # mean 5, s = sqrt(20/3), t(0.975, 3) = 3.182446, so the margin is 3.182446 * 2.581989 / 2
    found = mean_interval([2, 4, 6, 8])
    assert (found.mean, found.n, found.missing) == (5, 4, 0)
    assert found.low == pytest.approx(5 - 4.108519, abs=1e-5)
    assert found.high == pytest.approx(5 + 4.108519, abs=1e-5)
    wider = mean_interval([2, 4, 6, 8], level=0.99)  # t(0.995, 3) = 5.840909
    assert wider.high == pytest.approx(5 + 5.840909 * 2.581989 / 2, abs=1e-5)


def test_mean_interval_at_the_edges() -> None:
    nothing = mean_interval([])
    assert math.isnan(nothing.mean)
    assert nothing.n == nothing.missing == 0
    one = mean_interval([0.5, NAN])
    assert (one.mean, one.n, one.missing) == (0.5, 1, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    equal = mean_interval([1.0, 1.0, 1.0])
    assert equal.low == equal.mean == equal.high == 1


def test_paired_by_hand() -> None:
    # Differences 1, 2, 3, -1: mean 1.25, s = 1.7078, t = 1.4639. The sum is 5; of the 16 signings
    # (7 5 5 3 1 3 1 -1 and their negatives) the sums 7, 5, 5 reach it: 2 * 3 / 16.
    found = paired([2, 4, 6, 3], [1, 2, 3, 4])
    assert found.mean == 1.25
    assert found.p_exact == 2 * 3 / 16
    assert found.p_t == pytest.approx(0.2394, abs=1e-4)
    assert found.high == pytest.approx(1.25 + 3.182446 * 1.707825 / 2, abs=1e-5)
    assert (found.n, found.missing) == (4, 0)


def test_pairing_is_what_tells_small_differences_from_a_large_spread() -> None:
    base = np.array([0.1, 0.5, 0.9, 0.3, 0.7, 0.2])
    found = paired(base + np.array([0.01, 0.02, 0.01, 0.02, 0.01, 0.02]), base)
    assert found.p_exact == smallest_p(6)
    assert found.low > 0


def test_seeds_that_lack_a_side_are_counted_and_left_out() -> None:
    found = paired([1.0, NAN, 3.0, 4.0, math.inf], [0.0, 1.0, NAN, 2.0, 1.0])
    assert found == replace(paired([1.0, 4.0], [0.0, 2.0]), missing=3)
    nothing = paired([NAN, 1.0], [1.0, NAN])
    assert (nothing.n, nothing.missing) == (0, 2)
    assert all(math.isnan(x) for x in (nothing.mean, nothing.low, nothing.p_exact, nothing.p_t))
    with pytest.raises(ValueError, match="paired by seed"):
        paired([1, 2], [1])


def test_one_pair_has_no_interval() -> None:
    found = paired([1.0], [0.0])
    assert (found.mean, found.p_exact, found.n) == (1.0, 1.0, 1)
    assert math.isnan(found.low)
    assert math.isnan(found.p_t)


@pytest.mark.parametrize("shift", [0.0, 0.3])
def test_equal_differences_are_equal_but_for_rounding(shift: float) -> None:
    base = [0.1, 0.7, 1.3]  # base + 0.3 - base is 0.3 but for rounding
    found = paired([x + shift for x in base], base)
    assert found.mean == found.low == found.high == pytest.approx(shift)
    assert found.p_exact == (0.25 if shift else 1.0)
    assert math.isnan(found.p_t)


def test_a_difference_of_rounding_is_none() -> None:
    found = paired([0.1 + 0.2] * 6, [0.3] * 6)
    assert (found.mean, found.low, found.high, found.p_exact) == (0, 0, 0, 1)


def test_many_seeds_flip_at_random_and_the_same_each_time() -> None:
    base = np.zeros(20)
    x = np.linspace(-0.9, 1.1, 20)
    assert 0.2 < paired(x, base).p_exact == paired(x, base).p_exact < 0.8
    assert 0 < paired(x + 9, base).p_exact < 1e-4


@given(pairs)
@settings(max_examples=60, deadline=None)
def test_p_exact_counts_the_signings_as_extreme(drawn: list[tuple[float, float]]) -> None:
    x, base = np.array(drawn).T
    differences = x - base
    assume(np.all((differences == 0) | (np.abs(differences) > 1e-6)))
    means = np.array([np.mean(differences * signs) for signs in product([1, -1], repeat=len(drawn))])
    observed = differences.mean()
    tiny = 1e-12 * 100
    one_sided = min(np.mean(means >= observed - tiny), np.mean(means <= observed + tiny))
    found = paired(x, base)
    assert found.p_exact == pytest.approx(min(1.0, 2 * one_sided))
    assert found.p_exact >= smallest_p(found.n)


@given(pairs)
@settings(max_examples=60, deadline=None)
def test_the_sides_are_exchangeable(drawn: list[tuple[float, float]]) -> None:
    x, base = np.array(drawn).T
    one, other = paired(x, base), paired(base, x)
    negated = Difference(-other.mean, -other.high, -other.low, other.p_exact, other.p_t, other.n, other.missing)
    assert list(vars(one).values()) == pytest.approx(list(vars(negated).values()), nan_ok=True)


# A sum next to zero, where rounding differs with the order.
@example(
    [(7, 0), (100, -30), (-57.7314091039116, 0), (0, 0), (82, -38), (0, 0), (0, 29), (-70, 100)],
    [0, 1, 3, 4, 2, 5, 6, 7],
)
@given(pairs, st.permutations(range(8)))
@settings(max_examples=60, deadline=None)
def test_the_order_of_seeds_does_not_matter(drawn: list[tuple[float, float]], order: list[int]) -> None:
    x, base = np.array(drawn).T
    moved = [i for i in order if i < len(drawn)]
    one, other = paired(x, base), paired(x[moved], base[moved])
    assert list(vars(one).values()) == pytest.approx(list(vars(other).values()), nan_ok=True, abs=1e-9)


@given(pairs)
@settings(max_examples=60, deadline=None)
def test_the_interval_and_the_t_test_agree(drawn: list[tuple[float, float]]) -> None:
    x, base = np.array(drawn).T
    found = paired(x, base)
    assume(not math.isnan(found.p_t))
    assume(abs(found.p_t - 0.05) > 1e-6)
    assert (found.p_t < 0.05) == (not found.low <= 0 <= found.high)


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.04 times 3, 2, 1, never falling: 0.03, 0.04, 0.04.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([]) == []
    assert holm([0.01, 0.04, NAN]) == pytest.approx([0.03, 0.08, NAN], nan_ok=True)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
@settings(deadline=None, max_examples=8)  # statsmodels collects garbage at every call: 0.1 s
def test_holm_steps_down_from_bonferroni(ps: list[float]) -> None:
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        corrected[i] = largest
    assert holm(ps) == pytest.approx(corrected)


def test_what_few_seeds_can_reach() -> None:
    assert [smallest_p(n) for n in (0, 1, 5, 6, 8)] == [1, 1, 0.0625, 0.03125, 0.0078125]
    assert smallest_holm_p(5, 5) == 0.3125
    assert smallest_holm_p(3, 100) == 1
    assert [seeds_needed(arms) for arms in (1, 2, 5, 7, 10)] == [6, 7, 8, 9, 9]
    assert seeds_needed(1, alpha=0.01) == 8


@given(st.integers(1, 50), st.floats(1e-4, 0.5))
def test_seeds_needed_is_enough_and_not_more(arms: int, alpha: float) -> None:
    n = seeds_needed(arms, alpha)
    assert smallest_holm_p(n, arms) <= alpha
    assert n == 1 or smallest_holm_p(n - 1, arms) > alpha


@pytest.mark.parametrize("n", [5, 6, 8])
def test_the_smallest_p_is_reached(n: int) -> None:
    assert paired(np.arange(1, n + 1), np.zeros(n)).p_exact == smallest_p(n)


def test_simultaneous_intervals_hold_together() -> None:
    assert simultaneous_level(0) == simultaneous_level(1) == pytest.approx(0.95)
    assert simultaneous_level(5) == pytest.approx(0.99)
    random = np.random.default_rng(0)
    arms = random.normal(size=(400, 4, 6)) - random.normal(size=(400, 1, 6))  # 4 arms against one base
    covered = 0
    for study in arms:
        found = [mean_interval(arm, simultaneous_level(4)) for arm in study]
        covered += all(interval.low <= 0 <= interval.high for interval in found)
    assert covered / 400 > 0.94


def test_interaction_by_hand() -> None:
    # (ab - a) - (b - base): (0.9-0.5)-(0.3-0.1) = 0.2 and (0.8-0.6)-(0.2-0.2) = 0.2
    found = interaction(base=[0.1, 0.2, 0.1], a=[0.5, 0.6, NAN], b=[0.3, 0.2, 0.1], ab=[0.9, 0.8, 0.7])
    assert found.mean == pytest.approx(0.2)
    assert (found.n, found.missing, found.p_exact) == (2, 1, 0.5)
    assert interaction([0, 1], [2, 3], [4, 5], [6, 7]).mean == 0
