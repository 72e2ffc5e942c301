"""Arms against a base with more seeds: exact where runs can be relabelled, and not fooled by arms that are noisier."""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import ALPHA, Difference
from deltalab.statistics.unbalanced import RELABELLINGS, Groups, compare_groups, relabellings

Array = NDArray[np.float64]
Drawn = tuple[Array, Array]
"""The scores of the arms [arms, n] and of the base [b]."""


def compared(arms: Sequence[Sequence[float]] | Array, base: Sequence[float] | Array, **more: float) -> list[Difference]:
    margins = [more["margin"]] * len(arms) if more else None
    return compare_groups([Groups.plain(arm, base) for arm in arms], margins=margins)


def naive_p(arm: Array, base: Array) -> float:
    """The share of relabellings whose difference of means is at least the observed, counted one by one."""
    pool, n = np.concatenate([arm, base]), len(arm)
    differences = [abs(pool[order[:n]].mean() - pool[order[n:]].mean()) for order in relabellings(n, len(base))]
    return sum(d >= differences[0] * (1 - 1e-9) for d in differences) / RELABELLINGS


def test_p_is_that_of_the_definition() -> None:
    random = np.random.default_rng(2)
    for sd in (1.0, 3.0):  # With equal noise the relabellings decide, with noisy arms Welch's test.
        arms, base = sd * random.normal(size=(3, 6)) + [[1.4], [0.0], [0.5]], random.normal(size=11)
        for j, found in enumerate(compared(arms, base)):
            variances = arms.var(1, ddof=1)
            others = float(np.median(np.delete(variances, j)))
            v, of_base = max(variances[j], (variances[j] + others) / 2) / 6, base.var(ddof=1) / 11
            freedom = (v + of_base) ** 2 / (v**2 / 10 + of_base**2 / 10)
            t = (arms[j].mean() - base.mean()) / math.sqrt(v + of_base)
            p = max(naive_p(arms[j], base), 2 * stats.t.sf(abs(t), freedom))
            assert found.p == pytest.approx(min(1, 3 * p))
            assert (found.n, found.of_base, found.mean) == (6, 11, pytest.approx(arms[j].mean() - base.mean()))


def test_relabellings_are_as_likely_as_all_are() -> None:
    """All ways to choose 6 of 11 runs, against those drawn by lot."""
    random = np.random.default_rng(4)
    arm, base = random.normal(size=6) + 1, random.normal(size=5)
    pool = np.concatenate([arm, base])
    every = [abs(pool[[*of]].mean() - np.delete(pool, of).mean()) for of in combinations(range(11), 6)]
    exact = np.mean(np.array(every) >= abs(arm.mean() - base.mean()) * (1 - 1e-9))
    assert naive_p(arm, base) == pytest.approx(exact, abs=3 * math.sqrt(exact / RELABELLINGS))


@st.composite
def drawn_groups(draw: st.DrawFn) -> Drawn:
    n, more, arms = draw(st.integers(2, 7)), draw(st.integers(1, 10)), draw(st.integers(1, 3))
    values = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]) | st.floats(-2, 2)
    scores = [draw(st.lists(values, min_size=size, max_size=size)) for size in [n] * arms + [n + more]]
    return np.array(scores[:-1]), np.array(scores[-1])


@given(drawn_groups())
@example((np.full((2, 6), 0.9), np.full(16, 0.9)))
@example((np.full((1, 6), 1.0), np.full(16, 0.3)))
@example((np.array([[0.1] * 5 + [0.3]]), np.array([0.3] + [0.1] * 9)))
@settings(max_examples=40, deadline=None)
def test_the_interval_holds_what_the_test_does_not_reject(drawn: Drawn) -> None:
    arms, base = drawn
    for j, found in enumerate(compared(arms, base)):
        assert found.low <= found.mean <= found.high
        assert found.decided == (found.p <= ALPHA), "the verdict agrees with p"
        if not math.isfinite(found.low):
            continue
        width = max(found.high - found.low, 1e-3)
        for off, inside in ((found.low, -1), (found.high, 1)):
            for step, rejected in ((1e-3 * width, True), (-1e-3 * width, False)):
                shifted = arms.copy()
                shifted[j] -= off + inside * step
                if rejected or found.high - found.low > 2e-3 * width:
                    assert (compared(shifted, base)[j].p <= ALPHA) == rejected


def test_an_arm_that_scores_as_the_base_is_not_told() -> None:
    for found in compared(np.full((2, 6), 0.1 + 0.2), np.full(16, 0.3)):
        assert (found.mean, found.p, found.decided) == (0.0, 1.0, False)


def equal(random: np.random.Generator) -> Drawn:
    return random.normal(size=(7, 6)), random.normal(size=16)


def quiet_base(random: np.random.Generator) -> Drawn:
    return random.normal(size=(7, 6)), random.normal(size=16) / 3


def noisy_arms(random: np.random.Generator) -> Drawn:
    return random.normal(size=(7, 6)) * np.array([[1], [1], [1], [3], [3], [3], [3]]), random.normal(size=16)


def two_collapse(random: np.random.Generator) -> Drawn:
    """The first two arms lose by far with a fifth of their seeds, so that they truly differ."""
    arms, base = equal(random)
    arms[:2] -= 20 * (random.random((2, 6)) < 0.2)
    return arms, base


def ties(random: np.random.Generator) -> Drawn:
    return np.minimum(0, random.normal(size=(7, 6))), np.minimum(0, random.normal(size=16))


def shares_told(draw: Callable[[np.random.Generator], Drawn], studies: int = 120) -> tuple[float, float]:
    """The shares of studies with a false verdict: of this test, and of relabellings alone."""
    random, told, naive = np.random.default_rng(6), 0, 0
    first = 2 if draw is two_collapse else 0
    for _ in range(studies):
        arms, base = draw(random)
        found = compared(arms, base)
        told += any(difference.p <= ALPHA for difference in found[first:])
        assert all(difference.decided == (difference.p <= ALPHA) for difference in found)
        naive += any(_relabelled_p(arm, base) <= ALPHA / len(arms) for arm in arms[first:])
    return told / studies, naive / studies


def _relabelled_p(arm: Array, base: Array) -> float:
    pool, orders, n = np.concatenate([arm, base]), relabellings(len(arm), len(base)), len(arm)
    d = np.abs(pool[orders[:, :n]].mean(1) - pool[orders[:, n:]].mean(1))
    return float((d >= d[0] * (1 - 1e-9)).mean())


@pytest.mark.parametrize("draw", [equal, two_collapse, ties, noisy_arms, quiet_base])
def test_at_most_one_study_of_twenty_errs(draw: Callable[[np.random.Generator], Drawn]) -> None:
    told, naive = shares_told(draw)
    assert told <= 0.08, "0.05, known to 0.02"
    if draw in (noisy_arms, quiet_base):
        assert naive >= 0.15, "relabellings alone take noise for a difference"


def tuned(random: np.random.Generator, arms: int, n: int, b: int) -> list[Sample]:
    """Draws the runs of a base and of arms that are alike, with three candidates of which two are worse."""
    samples = []
    for size in (b, *[n] * arms):
        luck = random.normal(size=(size, 3)) - [1, 0, 1]
        validation, test = (luck + 0.2 * random.normal(size=luck.shape) for _ in range(2))
        samples.append(Sample(validation, test))
    return samples


def test_a_larger_base_chooses_by_as_many_seeds_as_an_arm() -> None:
    (base, arm) = tuned(np.random.default_rng(3), 1, 6, 16)
    of_arm, of_base = Groups(arm, base).results
    blocks = [slice(0, 6), slice(6, 12), slice(10, 16)]
    alone = [Sample(base.validation[block], base.test[block]).results() for block in blocks]
    np.testing.assert_allclose(of_base, np.concatenate([alone[0], alone[1], alone[2][2:]]))
    np.testing.assert_allclose(of_arm, arm.results())
    assert not np.allclose(of_base, base.results())


def test_seeds_that_tune_are_weighed_anew_after_every_relabelling() -> None:
    base, arm = tuned(np.random.default_rng(5), 1, 6, 9)
    groups = Groups(arm, base)
    validation, test = np.concatenate([arm.validation, base.validation]), np.concatenate([arm.test, base.test])
    for i, d in list(enumerate(groups.relabelled()))[::500]:
        order = relabellings(6, 9)[i]
        one, other = order[:6], order[6:]
        first = Sample(validation[one], test[one]).results().mean()
        assert d == pytest.approx(first - Sample(validation[other], test[other], block=6).results().mean())


def test_a_shift_of_every_score_shifts_the_interval_alone() -> None:
    base, arm, other = tuned(np.random.default_rng(8), 2, 6, 16)
    plain = compare_groups([Groups(arm, base), Groups(other, base)])
    moved = compare_groups([Groups(arm.shifted(0.7), base), Groups(other, base)])
    for end in ("mean", "low", "high"):
        assert getattr(moved[0], end) == pytest.approx(getattr(plain[0], end) + 0.7)
    assert moved[1] == plain[1]


def test_equal_is_what_two_one_sided_tests_say() -> None:
    random, margin = np.random.default_rng(9), 0.5
    for _ in range(20):
        arms, base = 0.25 * random.normal(size=(2, 8)) + [[0.0], [0.3]], 0.25 * random.normal(size=20)
        for j, found in enumerate(compared(arms, base, margin=margin)):
            shifts = [np.where(np.arange(2)[:, None] == j, arms - by, arms) for by in (-margin, margin)]
            rejected = all(compared(shifted, base)[j].p <= 2 * ALPHA for shifted in shifts)
            assert found.is_equal == (rejected and abs(found.mean) < margin)


def differing(random: np.random.Generator, by: float) -> Iterator[Drawn]:
    for _ in range(150):
        arms, base = 0.25 * random.normal(size=(3, 8)) + by, 0.25 * random.normal(size=24)
        yield arms, base


def test_arms_that_differ_by_the_margin_are_seldom_equal() -> None:
    wrong = sum(
        any(found.is_equal for found in compared(arms, base, margin=0.5))
        for arms, base in differing(np.random.default_rng(10), 0.5)
    )
    right = sum(
        compared(arms, base, margin=0.5)[0].is_equal for arms, base in differing(np.random.default_rng(10), 0.0)
    )
    assert wrong / 150 <= 0.08 < 0.5 < right / 150


def test_a_single_seed_decides_nothing() -> None:
    (found,) = compared([[5.0]], [0.0, 0.1, 0.2])
    assert (found.low, found.high, found.p, found.decided) == (-math.inf, math.inf, 1.0, False)


def test_so_many_arms_that_no_relabelling_is_rare_enough_have_no_interval() -> None:
    random = np.random.default_rng(0)
    found = compare_groups([Groups.plain(random.normal(size=6) + 50, random.normal(size=16))] * 210)
    assert (found[0].low, found[0].decided) == (-math.inf, False)
    assert found[0].p >= 210 / RELABELLINGS > ALPHA
