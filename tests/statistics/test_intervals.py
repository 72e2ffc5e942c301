"""The mean of an arm and the share of seeds that learned, against values computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltalab.statistics.intervals import mean_interval, share_learned, student_draws, within


def test_mean_interval_by_hand() -> None:
    # mean 5, s = sqrt(20/3), t(0.975, 3) = 3.182446, so the margin is 3.182446 * 2.581989 / 2
    found = mean_interval([2, 4, 6, 8])
    assert (found.mean, found.n, found.missing) == (5, 4, 0)
    assert found.low == pytest.approx(5 - 4.108519, abs=1e-5)
    assert found.high == pytest.approx(5 + 4.108519, abs=1e-5)


def test_mean_interval_at_the_edges() -> None:
    nothing = mean_interval([])
    assert math.isnan(nothing.mean)
    assert nothing.n == 0
    one = mean_interval([0.5], missing=1)
    assert (one.mean, one.n, one.missing) == (0.5, 1, 1)
    assert math.isnan(one.low)
    assert math.isnan(one.high)
    equal = mean_interval([1.0, 1.0, 1.0])
    assert equal.low == equal.mean == equal.high == 1


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_an_interval_of_a_bounded_metric_stays_inside_the_bounds(values: list[float]) -> None:
    free, found = mean_interval(values), mean_interval(values, (0, 1))
    assert 0 <= found.low <= found.mean + 1e-12
    assert found.mean - 1e-12 <= found.high <= 1
    assert (found.low, found.high) == (max(free.low, 0), min(free.high, 1))


def test_what_is_not_bounded_is_not_cut_off() -> None:
    assert within(-3, 7, None) == (-3, 7)
    assert within(-3, 7, (-1, 8)) == (-1, 7)


def at_most(k: int, n: int, p: float) -> float:
    """The probability of at most k of n."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


@pytest.mark.parametrize(("learned", "n"), [(1, 6), (3, 4), (5, 9), (14, 15)])
def test_the_share_that_learned_has_an_exact_interval(learned: int, n: int) -> None:
    """Each end is the share at which what was seen, or more extreme, has 2.5% (Clopper and Pearson)."""
    found = share_learned([0.9] * learned + [0.1] * (n - learned), 0.5)
    assert (found.learned, found.n) == (learned, n)
    assert at_most(learned, n, found.high) == pytest.approx(0.025)
    assert 1 - at_most(learned - 1, n, found.low) == pytest.approx(0.025)


def test_all_and_none_learned() -> None:
    assert share_learned([0.9] * 6, 0.5).high == 1
    assert share_learned([0.9] * 6, 0.5).low == pytest.approx(0.025 ** (1 / 6))
    assert share_learned(np.zeros(6), 0.5).low == 0
    assert share_learned([0.5], 0.5).learned == 0, "half way is not past it"


@pytest.mark.parametrize("seeds", [2, 4, 9])
def test_draws_of_a_sum_of_means_are_spread_as_its_t_interval(seeds: int) -> None:
    x = np.random.default_rng(seeds).normal(size=(2, 3, seeds))
    weights = np.array([[1.0, -2.0, 0.5], [-1.0, 1.0, 0.0]])
    draws = student_draws(x)
    assert draws[0] == pytest.approx(x.mean(-1))
    sums = (draws * weights).sum((1, 2))
    expected = mean_interval((x * weights[..., None]).sum((0, 1)))
    low, high = np.quantile(sums[1:], (0.025, 0.975))
    assert high - low == pytest.approx(expected.high - expected.low, rel=0.15)
    assert (low + high) / 2 == pytest.approx(expected.mean, abs=0.1 * (high - low))


def test_draws_with_another_seed_are_independent() -> None:
    x = np.arange(5.0)
    first, second = student_draws(x), student_draws(x, seed=1)
    assert abs(np.corrcoef(first[1:], second[1:])[0, 1]) < 0.1
