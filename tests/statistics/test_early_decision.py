"""The estimate after a stop against studies drawn one by one, and against what must hold for any differences."""

import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtr

from deltalab.statistics import early_decision
from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.early_decision import Boundaries, futility, reach, unbiased
from deltalab.statistics.joint_test import ALPHA, Look, follow, one_look
from deltalab.statistics.looks import spread_looks
from deltalab.statistics.pairs import Pairs

Array = NDArray[np.float64]
LOOKS = spread_looks(6, 15)
NEVER = (math.inf, math.inf)


# The module's definition again, in plain loops over studies drawn one by one.


def decided_by(x: list[float], looks: list[Boundaries]) -> int | None:
    """The look that decides differences; None if none does."""
    for k, look in enumerate(looks):
        mean = abs(sum(x[: look.seeds])) / look.seeds
        if mean > look.decided:
            return k
        if look.given_up[0] <= mean <= look.given_up[1]:
            return None
    return None


def share_above(d: Array, shift: float, looks: list[Boundaries], studies: int) -> float:
    """The share of larger means among the studies that the look decides that decided d, if shift is the truth."""
    observed: list[float] = d.tolist()
    draw, own, counts, n = random.Random(3), decided_by(observed, looks), [0, 0], len(observed)
    sd = math.sqrt(sum((x - sum(observed) / n) ** 2 for x in observed) / (n - 3))
    for _ in range(studies):
        x = [draw.gauss(shift, sd) for _ in observed]
        if decided_by(x, looks) == own:
            counts[sum(x) > sum(observed)] += 1
    return counts[1] / sum(counts)


DECIDED = np.array([1.1, 0.4, 1.9, 0.7, 1.2, 0.9, 0.3, 1.6])
FEW, MORE, LAST = Boundaries(6, math.inf, (0.0, 0.2)), Boundaries(8, 0.9, NEVER), Boundaries(8, 0.0, NEVER)
CASES = {
    "decided": [FEW, MORE],
    "third look": [Boundaries(4, 1.3, NEVER), Boundaries(6, 1.1, NEVER), MORE],
    "margin": [Boundaries(6, 1.5, (0.1, 0.4)), MORE],
    "last": [Boundaries(6, 1.1, (0.0, 0.4)), LAST],
}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("looks", CASES.values(), ids=CASES)
def test_half_of_the_studies_that_the_look_decides_have_a_larger_mean(looks: list[Boundaries], sign: int) -> None:
    """20,000 studies, of which over 2,000 are decided alike, tell a share of 0.5 from others to 0.025."""
    d = sign * DECIDED
    assert decided_by(d.tolist(), looks) == len(looks) - 1
    found = unbiased(d, looks, -9.0, 9.0)
    assert share_above(d, found, looks, 20_000) == pytest.approx(0.5, abs=0.025)
    away = 0.4 * float(d.std())
    assert share_above(d, found - away, looks, 5000) < 0.45 < 0.55 < share_above(d, found + away, looks, 5000)


def test_more_nodes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [unbiased(DECIDED, looks, -9.0, 9.0) for looks in CASES.values()]
    nodes, weights = np.polynomial.legendre.leggauss(320)
    monkeypatch.setattr(early_decision, "NODES", nodes)
    monkeypatch.setattr(early_decision, "WEIGHTS", weights)
    assert [unbiased(DECIDED, looks, -9.0, 9.0) for looks in CASES.values()] == pytest.approx(found, abs=1e-6)


def prospect(d: Array, margin: float, share: float) -> float:
    """The formula of conditional power, of the better of two prospects: to differ from 0, or to be equal."""

    def power(off: float, level: float) -> float:
        z = -ndtri(stdtr(len(d) - 1, -math.sqrt(len(d)) * off / d.std(ddof=1)))
        return float(ndtr((z / math.sqrt(share) + ndtri(level)) / math.sqrt(1 - share)))

    return max(power(abs(d.mean()), ALPHA / 6), power(margin - abs(d.mean()), ALPHA / 3))


@pytest.mark.parametrize(("seeds", "margin"), [(6, 0.0), (8, 0.3), (11, 0.0)])
def test_arms_are_given_up_by_the_formula_of_their_prospect(seeds: int, margin: float) -> None:
    noise = np.array([1.0, -0.8, 0.2, -0.4] * 3)[:seeds]
    noise -= noise.mean()
    least, largest = futility(noise, margin, seeds / 15, ALPHA / 3, 0.1)
    for mean in np.linspace(0, 1.5, 151):
        assert (least <= mean <= largest) == (prospect(noise + mean, margin, seeds / 15) < 0.1), mean
    assert largest < 1.5
    assert (least > 0) == (margin > 0)


# What must hold for any differences.

numbers = st.lists(st.floats(-10, 10), min_size=6, max_size=6).filter(lambda d: np.std(d) > 0.01)


@example([0.5, 1.5, 0.2, 0.9, 1.1, 0.4])
@example([5.0, 5.01, 4.99, 5.0, 5.02, 4.98])
@given(numbers)
@settings(max_examples=20, deadline=None)
def test_a_single_look_leaves_the_mean_as_it_is(d: list[float]) -> None:
    found = unbiased(np.array(d), [Boundaries(6, 0.0, NEVER)], -20.0, 20.0)
    assert found == pytest.approx(np.mean(d), abs=1e-6 * (1 + np.std(d)))


@given(st.integers(0, 10_000), st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=6, deadline=None)
def test_estimates_lie_in_their_intervals_and_follow_sign_and_unit(seed: int, unit: float) -> None:
    d = 1.0 + np.random.default_rng(seed).normal(size=(2, 15))
    for one, other in zip(follow(list(d), LOOKS), follow(list(-unit * d), LOOKS), strict=True):
        assert one.stopped == other.stopped
        if one.unbiased is not None:
            assert one.difference.low <= one.unbiased <= one.difference.high
            assert other.unbiased == pytest.approx(-unit * one.unbiased, abs=0.02 * unit)


def test_a_decision_that_was_nearly_missed_shrinks_most() -> None:
    """With the same noise, an arm far beyond the boundary keeps its mean; one at the boundary has next to nothing."""
    noise = DECIDED - DECIDED.mean()
    means = [0.91, 1.0, 1.1, 1.3, 1.6, 2.5]
    kept = [unbiased(noise + mean, [FEW, MORE], 0.0, 9.0) / mean for mean in means]
    assert kept == sorted(kept)
    assert kept[0] < 0.2
    assert kept[-1] == pytest.approx(1, abs=0.01)


def test_a_mean_that_was_nearly_enough_earlier_grows() -> None:
    """An arm that the first look would have decided, had its mean been larger, is more likely to be underestimated."""
    assert unbiased(DECIDED, [Boundaries(6, 1.1, NEVER), LAST], -9.0, 9.0) > DECIDED.mean()


def test_seeds_that_agree_leave_nothing_to_chance() -> None:
    looks = [FEW, Boundaries(8, 0.1, NEVER)]
    assert unbiased(np.full(8, 0.3), looks, 0.1, 0.5) == pytest.approx(0.3)
    assert unbiased(np.full(8, 0.1) + 0.2, looks, 0.1, 0.5) == pytest.approx(0.3)
    assert unbiased(np.zeros(8), [FEW, LAST], -1.0, 1.0) == 0.0


# What `follow` gives.


def test_arms_that_were_decided_or_ended_have_an_estimate_and_no_others() -> None:
    draw = np.random.default_rng(8)
    steady, noise = 1.0 + 0.1 * draw.normal(size=15), draw.normal(size=15)
    decided, given_up = follow([steady, noise], LOOKS)
    assert (decided.stopped, decided.unbiased) == ("decided", pytest.approx(decided.difference.mean, rel=1e-3))
    assert (given_up.stopped, given_up.unbiased) == ("hopeless", None)
    assert [outcome.unbiased for outcome in follow([steady[:5]], spread_looks(3, 5))] == [None], "no interval"
    assert [outcome.unbiased for outcome in follow([steady, noise], one_look(15))] == [None, None]
    assert [outcome.unbiased for outcome in follow([steady, noise], LOOKS, intervals=False)] == [None, None]
    (equal,) = follow([0.01 * noise], LOOKS, margins=[1.0])
    assert (equal.stopped, equal.difference.is_equal, equal.unbiased) == ("decided", True, None)
    near, noisy = [1.0, 1.2, 0.9, 1.1, 1.3, -0.4, 0.8], [1.0, -2.1, 0.3, -0.6, 1.9, -0.4, 1.0]
    on, _ = follow([near, noisy], spread_looks(7, 9))
    assert (on.stopped, on.unbiased) == (None, None)


def test_a_further_look_has_given_up_nothing() -> None:
    """Whoever adds seeds after a test that spent all of alpha does so for hopeless arms, too."""
    d = np.array([0.9, -1.1, 0.4, 1.2, -1.0, -0.3, 1.1, 0.8, -0.4, 1.4, -1.3, 0.7])
    planned, further = (Look(6, 0.0126), Look(12, ALPHA)), (Look(6, ALPHA, True), Look(12, 1.05 * ALPHA, True))
    (one,), (other,) = follow([d], planned), follow([d], further)
    assert one.stopped == "hopeless"
    assert (other.stopped, other.difference.n) == ("last", 12)
    first = follow([d[:6]], further)[0].difference
    looks = [Boundaries(6, reach(first.mean, first.low, first.high), NEVER), Boundaries(12, 0.0, NEVER)]
    assert other.unbiased == unbiased(d, looks, other.difference.low, other.difference.high)


def test_where_seeds_tune_the_looks_are_those_of_the_exchange() -> None:
    draw = np.random.default_rng(6)
    luck = draw.normal(size=(2, 15, 3))
    arm, base = (Sample(runs + 0.2 * draw.normal(size=runs.shape), runs) for runs in luck)
    pairs = Pairs(arm.shifted(1.6), base)
    (outcome,) = follow([pairs], LOOKS)
    n = outcome.difference.n
    assert outcome.stopped == "decided"
    assert n < 15
    passed = []
    for look in LOOKS:
        if look.seeds <= n:
            so_far = pairs.head(look.seeds)
            found = follow([so_far], LOOKS)[0].difference
            given_up = futility(so_far.differences, 0.0, look.seeds / 15, ALPHA, 0.1)
            passed.append(Boundaries(look.seeds, reach(found.mean, found.low, found.high), given_up))
    low, high = outcome.difference.low, outcome.difference.high
    assert outcome.unbiased == unbiased(pairs.head(n).differences, passed, low, high)
    assert outcome.unbiased < outcome.difference.mean


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.75, 1.25])
def test_half_of_the_estimates_are_above_the_truth(size: float) -> None:
    """Also of arms that were decided early, most of whose means are above."""
    draw, early, every = np.random.default_rng(12), [], []
    for _ in range(200):
        (outcome,) = follow([size + math.sqrt(2) * draw.normal(size=15)], LOOKS)
        if outcome.unbiased is not None:
            every.append(outcome.unbiased > size)
            if outcome.difference.n < 15:
                early.append((outcome.unbiased > size, outcome.difference.mean > size))
    assert np.mean(every) == pytest.approx(0.5, abs=0.12)
    above, means_above = np.mean(early, axis=0)
    assert above == pytest.approx(0.5, abs=0.18)
    assert means_above > 0.7
