"""The joint test against every flip counted one by one, and against what must hold for any differences."""

import math
from collections.abc import Sequence
from itertools import product
from statistics import median

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltalab.statistics import joint_test
from deltalab.statistics.joint_test import (
    ALPHA,
    Difference,
    Look,
    compare,
    flips,
    follow,
    one_look,
    rejected_by_look,
    rejects,
    seeds_needed,
    smallest_p,
)
from deltalab.statistics.looks import looks_of, spread_looks

Numbers = Sequence[float]


# The module's formula again, in plain loops over all 2^n flips.


def rms(d: Numbers) -> float:
    return math.sqrt(sum(x * x for x in d) / len(d))


def around_the_mean(d: Numbers) -> list[float]:
    mean = sum(d) / len(d)
    return [(x - mean) * math.sqrt(len(d) / (len(d) - 1)) for x in d]


def statistic(flipped: Numbers, c: float) -> float:
    n = len(flipped)
    mean = sum(flipped) / n
    sd = math.sqrt(max(sum(x * x for x in flipped) - n * mean * mean, 0.0) / (n - 1))
    if sd + c == 0:
        return math.inf if mean else 0.0
    return math.sqrt(n) * abs(mean) / (sd + c)


def p_by_hand(arms: Sequence[Numbers], j: int, decided: set[int], units: Sequence[int] | None = None) -> float:
    """p of "arm j does not differ", where other arms were decided."""
    units = units or [0] * len(arms)
    shown = [around_the_mean(d) if i in decided and i != j else [*d] for i, d in enumerate(arms)]
    c = [median(rms(d) for d, of in zip(shown, units, strict=True) if of == unit) / math.sqrt(2) for unit in units]
    own, count = statistic(shown[j], c[j]), 0
    for signs in product([1, -1], repeat=len(arms[0])):
        flipped = [[e * x for e, x in zip(signs, d, strict=True)] for d in shown]
        largest = max(map(statistic, flipped, c))
        count += largest >= own * (1 - 1e-9)
    return count / 2 ** len(arms[0])


def compared_by_hand(arms: Sequence[Numbers], units: Sequence[int]) -> list[float]:
    """p of each arm, after stepping down from the smallest."""
    decided: set[int] = set()
    while left := [j for j in range(len(arms)) if j not in decided]:
        p, j = min((p_by_hand(arms, j, decided, units), j) for j in left)
        if p > ALPHA:
            break
        decided.add(j)
    return [p_by_hand(arms, j, decided, units) for j in range(len(arms))]


def drawn(seed: int, arms: int, seeds: int) -> NDArray[np.float64]:
    """Arms with effects and scales of their own, correlated through the base."""
    random = np.random.default_rng(seed)
    scale = 10.0 ** random.integers(-1, 2, size=(arms, 1))
    effect = random.choice([0.0, 1.0, 4.0], size=(arms, 1))
    return scale * (random.normal(size=(arms, seeds)) + effect) - random.normal(size=seeds)


@pytest.mark.parametrize("seed", range(12))
def test_p_is_the_share_of_all_flips_that_reach_it(seed: int) -> None:
    arms = drawn(seed, arms=1 + seed % 3, seeds=6)
    if seed % 2:
        arms = np.round(arms)  # ties and zeros
    found, by_hand = compare(list(arms)), compared_by_hand(arms.tolist(), [0] * len(arms))
    assert_same_p(found, by_hand)


@pytest.mark.parametrize("seed", range(12))
def test_p_by_hand_in_several_units(seed: int) -> None:
    """The largest statistic is that of the arms of all units, and each unit has its own constant."""
    units = [[0, 1], [0, 1, 0], [2, 0, 1, 2, 1]][seed % 3]
    arms = drawn(seed, arms=len(units), seeds=6)
    found = compare(list(arms), units)
    assert_same_p(found, compared_by_hand(arms.tolist(), units))
    decided = {j for j, one in enumerate(found) if one.decided}
    for j, one in enumerate(found):
        for end in filter(math.isfinite, (one.low, one.high)):
            shifted = [[x - (i == j) * end for x in d] for i, d in enumerate(arms.tolist())]
            assert p_by_hand(shifted, j, decided, units) > ALPHA


def assert_same_p(found: Sequence[Difference], by_hand: Sequence[float]) -> None:
    for one, p in zip(found, by_hand, strict=True):
        # An interval that reaches 0 from values beyond it takes p along.
        assert one.p == pytest.approx(p) or one.p > ALPHA >= p


def test_a_single_arm_by_hand() -> None:
    # Of the 64 signings of 1 2 3 4 5 -1, sum 14: 16, 14 (two ways) and the negatives reach 14.
    (found,) = compare([[1, 2, 3, 4, 5, -1]])
    assert (found.mean, found.p, found.n, found.decided) == (14 / 6, pytest.approx(2 * 3 / 64), 6, False)
    (found,) = compare([[1, 2, 3, 4, 5, 6]])
    assert (found.p, found.decided) == (2 / 64, True)


def test_a_told_arm_steps_back_and_lets_another_be_told() -> None:
    strong = [5.0, 5.2, 4.9, 5.1, 5.0, 5.3, 4.8]
    weak = [0.5, 1.5, 0.8, 1.3, -0.05, 0.9, 1.0]
    found = compare([strong, weak])
    at_once = p_by_hand([strong, weak], 1, set())
    assert at_once > ALPHA >= p_by_hand([strong, weak], 1, {0}) == pytest.approx(found[1].p)
    assert [one.decided for one in found] == [True, True]


@pytest.mark.parametrize("arms", [1, 2, 12])
@pytest.mark.parametrize("seeds", [6, 8])
def test_the_smallest_p_is_reached_however_many_arms_there_are(arms: int, seeds: int) -> None:
    steady = [[1.0 + 0.1 * s + 0.01 * j * (-1) ** s for s in range(seeds)] for j in range(arms)]
    found = compare(steady)
    assert [one.p for one in found] == [2 / 2**seeds] * arms
    assert all(one.decided for one in found)


def test_flips_of_whole_seeds_keep_what_arms_share() -> None:
    """Arms that are one and the same count as one: flips drawn for each arm would take them for many."""
    d = [0.9, 1.1, 0.4, 1.6, -0.2, 1.2, 0.7]
    (alone,) = compare([d])
    assert [one.p for one in compare([d] * 5)] == [pytest.approx(alone.p)] * 5


def test_signs_drawn_for_each_arm_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug."""
    largest, random = joint_test._Family._largest, np.random.default_rng(0)

    def apart(self: joint_test._Family, j: int, shifts: NDArray[np.float64], signs: NDArray[np.float64]) -> object:
        found = []
        for i, pairs in enumerate(self.pairs):
            own = random.choice([-1.0, 1.0], size=signs.shape)
            own[0] = 1.0
            found.append(largest(joint_test._Family([pairs], [0], [0.0]), 0, shifts if i == j else np.zeros(1), own)[1])
        return np.maximum.reduce(np.broadcast_arrays(*found)), found[j]

    monkeypatch.setattr(joint_test._Family, "_largest", apart)
    with pytest.raises(AssertionError):
        test_flips_of_whole_seeds_keep_what_arms_share()


# What must hold for any differences.

values = st.one_of(
    st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 2.0]),
    st.floats(-100, 100, allow_nan=False, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-6),
)
scales = st.sampled_from([1e-3, 1.0, 1e3])


@st.composite
def families(draw: st.DrawFn, least: int = 2, most: int = 7) -> list[list[float]]:
    seeds, arms = draw(st.integers(least, most)), draw(st.integers(1, 3))
    family = []
    for _ in range(arms):
        shift, scale = draw(st.sampled_from([0.0, 3.0, -3.0])), draw(scales)
        family.append([scale * (shift + x) for x in draw(st.lists(values, min_size=seeds, max_size=seeds))])
    return family


@given(families(least=5), st.floats(0.01, 20))
@settings(max_examples=60, deadline=None)
def test_an_arm_is_equal_if_both_margins_are_rejected_on_one_side(family: list[list[float]], margin: float) -> None:
    looks = one_look(len(family[0]))
    for j, outcome in enumerate(follow(family, looks, margins=[margin] * len(family))):
        found = outcome.difference
        told = {i for i, one in enumerate(compare(family)) if one.decided}
        by_hand = [
            p_by_hand([[x - (i == j) * m for x in d] for i, d in enumerate(family)], j, told) for m in (-margin, margin)
        ]
        assume(all(abs(p - 2 * ALPHA) > 1e-6 for p in by_hand))
        assert found.is_equal == (abs(found.mean) < margin and max(by_hand) <= 2 * ALPHA)
        assert found.margin == margin
        assert not (found.is_equal and found.is_beyond)


@given(families())
@settings(max_examples=60, deadline=None)
def test_the_interval_leaves_out_0_exactly_where_p_is_small(family: list[list[float]]) -> None:
    for one in compare(family):
        assert (one.p <= ALPHA) == one.decided
        assert one.low <= one.mean <= one.high
        assert smallest_p(one.n) <= one.p <= 1


@given(families())
@settings(max_examples=30, deadline=None)
def test_better_and_worse_are_mirrored(family: list[list[float]]) -> None:
    mirrored = compare([[-x for x in d] for d in family])
    for one, other in zip(compare(family), mirrored, strict=True):
        found = vars(other) | {"mean": -other.mean, "low": -other.high, "high": -other.low}
        assert vars(one) == pytest.approx(found)


@example([[0.0] * 6, [0.003] * 6, [0.5] * 4 + [1.0] * 2], [*range(7)], [0, 2, 1])
@example([[-3.0, -3.0, -3.0, -1.0, -1.0, -14.0]] * 2, [*range(7)], [1, 0, 2])
@given(families(least=6), st.permutations(range(7)), st.permutations(range(3)))
@settings(max_examples=40, deadline=None)
def test_the_order_of_seeds_and_of_arms_does_not_matter(
    family: list[list[float]], seeds: list[int], arms: list[int]
) -> None:
    seeds, arms = [s for s in seeds if s < len(family[0])], [j for j in arms if j < len(family)]
    moved = compare([[family[j][s] for s in seeds] for j in arms])
    found = compare(family)
    for j, other in zip(arms, moved, strict=True):
        spread = 1e-3 * (1 + max(map(abs, family[j])))  # the resolution of the inversion
        given, want = ({k: v for k, v in vars(one).items() if v is not None} for one in (found[j], other))
        assert given == pytest.approx(want, rel=1e-6, abs=spread)


@example([0.5, 1.5, 0.2, 0.9, 1.1, 0.4], 3.0, 1.0)
@given(st.lists(values, min_size=6, max_size=8), st.floats(-50, 50), scales)
@settings(max_examples=30, deadline=None)
def test_an_interval_moves_with_its_differences(d: list[float], shift: float, scale: float) -> None:
    """To the resolution of the inversion: a hundredth of the spread."""
    (found,) = compare([[scale * x for x in d]])
    (moved,) = compare([[scale * (x + shift) for x in d]])
    margin = 0.02 * scale * max(np.std(d), 1e-3) + 1e-9 * scale
    assume(math.isfinite(found.low))
    width = found.high - found.low
    assert moved.low == pytest.approx(found.low + scale * shift, abs=margin + 0.02 * width)
    assert moved.high == pytest.approx(found.high + scale * shift, abs=margin + 0.02 * width)


def test_the_interval_is_that_of_the_values_that_are_not_rejected() -> None:
    arms = list(drawn(3, arms=3, seeds=7))
    found = compare(arms)[0]
    inside = np.linspace(found.low, found.high, 9)[1:-1]
    width = found.high - found.low
    assert not rejects(arms, inside, one_look(7)).any()
    assert rejects(arms, [found.low - 0.1 * width, found.high + 0.1 * width], one_look(7)).all()


@pytest.mark.parametrize("seeds", [(4, 7, 9), (6, 13, 20)])
def test_what_is_rejected_by_look_is_what_each_look_rejects(seeds: tuple[int, ...]) -> None:
    """Also when it is asked again for other shifts, or for the same ones."""
    random = np.random.default_rng(3)
    arms = list(random.normal(1.0, 1.0, size=(3, seeds[-1])))
    looks = [Look(n, spent) for n, spent in zip(seeds, (0.01, 0.03, 0.05), strict=True)]
    known = rejected_by_look(arms, looks)
    for shifts in (np.linspace(-2, 3, 9), np.linspace(0, 4, 7), np.linspace(0, 4, 7)):
        each = [rejects(arms, shifts, looks[:k]) for k in (1, 2, 3)]
        assert (known(shifts) == each).all()
        assert 0 < known(shifts).sum() < known(shifts).size


@pytest.mark.slow(keep="1")
@pytest.mark.parametrize("arms", [1, 3])
def test_intervals_hold_together(arms: int) -> None:
    """All true differences lie in their intervals in at least 95% of studies, one arm of another scale."""
    random, covered, studies = np.random.default_rng(5), 0, 120
    truth = np.array([0.0, 2.0, -30.0])[:arms]
    scale = np.array([1.0, 1.0, 10.0])[:arms]
    for _ in range(studies):
        d = truth[:, None] + scale[:, None] * random.normal(size=(arms, 6)) - 0.5 * random.normal(size=6)
        covered += all(one.low <= true <= one.high for one, true in zip(compare(list(d)), truth, strict=True))
    assert covered / studies >= 0.94


@pytest.mark.parametrize("seeds", range(1, 6))
def test_too_few_seeds_bound_nothing(seeds: int) -> None:
    for one in compare([np.arange(1.0, seeds + 1), np.ones(seeds)]):
        assert (one.low, one.high, one.n, one.decided) == (-math.inf, math.inf, seeds, False)
        assert one.p >= smallest_p(seeds) > ALPHA


def test_equal_differences() -> None:
    for c in (0.3, -2.0):
        (found,) = compare([[c] * 6])
        assert (found.mean, found.p, found.decided) == (pytest.approx(c), 2 / 64, True)
    (found,) = compare([[0.0] * 6])
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)
    same, apart = compare([[0.0] * 6, [1.0, 1.1, 0.9, 1.2, 0.8, 1.0]])
    assert (same.p, same.decided, apart.decided) == (1, False, True)


def test_nothing_to_compare() -> None:
    assert compare([]) == []
    (found,) = compare([[]])
    assert found.n == 0
    assert all(math.isnan(x) for x in (found.mean, found.low, found.high, found.p))
    assert not found.decided


def test_units_of_measurement_do_not_mix() -> None:
    """A task measured in thousandths does not change what is found of another."""
    bits, accuracy = drawn(1, arms=2, seeds=6), drawn(2, arms=2, seeds=6)
    family = [*bits, *accuracy]
    found = compare(family, [0, 0, 1, 1])
    scaled = compare([*(1000 * bits), *accuracy], [0, 0, 1, 1])
    assert [one.p for one in found] == pytest.approx([one.p for one in scaled])
    assert scaled[0].low == pytest.approx(1000 * found[0].low, rel=1e-6)


def test_many_seeds_flip_at_random_and_the_same_each_time() -> None:
    d = np.linspace(-0.9, 1.1, 20)
    assert 0.2 < compare([d])[0].p == compare([d])[0].p < 0.8
    assert compare([d + 9])[0].p <= 2 / 2**11
    assert flips(20).shape == (2**11, 20)
    assert (flips(20)[0] == 1).all()


def test_flips_are_all_signings_once_but_for_a_global_sign() -> None:
    signs = {tuple(row) for row in flips(6)}
    assert len(signs) == 32
    assert len(signs | {tuple(-x for x in row) for row in signs}) == 64


def test_what_few_seeds_can_reach() -> None:
    assert [smallest_p(n) for n in (0, 1, 5, 6, 8)] == [1, 1, 0.0625, 0.03125, 0.0078125]
    assert [seeds_needed(), seeds_needed(0.01), seeds_needed(0.5)] == [6, 8, 2]


@given(st.floats(1e-4, 0.5))
def test_seeds_needed_is_enough_and_not_more(alpha: float) -> None:
    n = seeds_needed(alpha)
    assert smallest_p(n) <= alpha < smallest_p(n - 1)


# Several looks.


@given(st.integers(2, 40), st.integers(1, 60))
def test_looks_grow_to_the_last_and_spend_no_more_than_alpha(at_least: int, more: int) -> None:
    looks = spread_looks(at_least, at_least + more)
    seeds, spent = [look.seeds for look in looks], [look.spent for look in looks]
    assert 2 <= len(looks) <= 4
    assert (seeds[0], seeds[-1]) == (at_least, at_least + more)
    assert seeds == sorted(set(seeds))
    assert spent == sorted(spent)
    assert spent[-1] == ALPHA


def share_decided(arms: NDArray[np.float64], looks: Sequence[Look]) -> float:
    """The share of all flips of the seeds in which some arm is decided at some look."""
    signs = flips(arms.shape[1])
    told = [any(outcome.difference.decided for outcome in follow(list(arms * e), looks)) for e in signs]
    return sum(told) / len(told)


@pytest.fixture
def without_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the search for an interval's ends, which takes most of the time."""

    def verdict(self: joint_test._Family, j: int, looks: Sequence[Look]) -> Difference:
        d = self.pairs[j].head(looks[-1].seeds).differences
        p = float(self.p(j, np.zeros(1), looks)[0])
        return Difference(float(d.mean()), 1.0 if p <= ALPHA else -1.0, 1.0, p, len(d))

    monkeypatch.setattr(joint_test._Family, "_difference", verdict)


@pytest.mark.parametrize("arms", [1, 3])
def test_a_further_look_errs_by_its_own_share_and_no_more(without_intervals: None, arms: int) -> None:
    looks = looks_of({"after": 6, "at_most": 8})
    for seed in range(3):
        share = share_decided(drawn(seed, arms, 8), looks)
        assert share <= looks[-1].spent == pytest.approx(0.0470833, abs=1e-6)
        assert share == 6 / 128, "2 of 64 flips at six seeds, and what 128 flips leave"


def test_a_further_look_trains_arms_without_a_prospect() -> None:
    looks = looks_of({"after": 6, "at_most": 8})
    (outcome,) = follow([[0.1, -0.1, 0.2, -0.2, 0.1, -0.1]], looks)
    assert outcome.stopped is None
    (outcome,) = follow([[0.1, -0.1, 0.2, -0.2, 0.1, -0.1]], spread_looks(6, 8))
    assert outcome.stopped == "hopeless"


@pytest.mark.parametrize("ties", [False, True])
def test_one_arm_spends_its_error_over_the_looks_and_no_more(without_intervals: None, ties: bool) -> None:
    looks = spread_looks(6, 8)
    for seed in range(3):
        arm = drawn(seed, 1, 8)
        share = share_decided(np.round(arm) if ties else arm, looks)
        assert share <= ALPHA
        assert ties or share == 6 / 128, "all that 128 flips allow"


def test_a_family_spends_its_error_over_the_looks_and_no_more(
    without_intervals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, while no arm is given up."""
    monkeypatch.setattr(joint_test, "HOPELESS", 0.0)
    for seed in range(2):
        assert share_decided(drawn(seed, 2, 8), spread_looks(6, 8)) <= ALPHA


def test_giving_up_arms_leaves_the_error_what_it_was_on_average(without_intervals: None) -> None:
    """A flip may be given up where another is not, so that a single family may spend a little more, or less."""
    shares = [share_decided(drawn(seed, 2, 8), spread_looks(6, 8)) for seed in range(6)]
    assert sum(shares) / len(shares) <= 0.055


def test_a_test_at_every_look_as_if_it_were_the_only_one_is_caught(without_intervals: None) -> None:
    """A planted bug: each look spends the whole error."""
    naive = [Look(n, ALPHA) for n in (6, 7, 8)]
    blind = joint_test._Family.p

    def forgets(self: joint_test._Family, j: int, shifts: NDArray[np.float64], looks: Sequence[Look]) -> object:
        return blind(self, j, shifts, looks[-1:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint_test._Family, "p", forgets)
        assert max(share_decided(drawn(seed, 1, 8), naive) for seed in range(6)) > ALPHA


STEADY = [1.0, 1.2, 0.9, 1.1, 1.3, 0.8, 1.0, 1.1, 0.9]
NOISE = [1.0, -2.1, 0.3, -0.6, 1.9, -0.4, 1.0, -1.5, 0.1]
LOOKS = spread_looks(7, 9)


def test_an_arm_that_is_decided_uses_no_later_seed() -> None:
    first = follow([STEADY[:7], NOISE[:7]], LOOKS)
    assert [outcome.stopped for outcome in first] == ["decided", "hopeless"]
    later = follow([STEADY, NOISE], LOOKS)
    assert later == first
    assert [outcome.difference.n for outcome in later] == [7, 7]


def test_an_arm_without_prospect_stops_and_one_with_prospect_goes_on() -> None:
    near = [1.0, 1.2, 0.9, 1.1, 1.3, -0.4, 0.8]
    outcomes = follow([near, NOISE[:7]], LOOKS)
    assert [outcome.stopped for outcome in outcomes] == [None, "hopeless"]
    assert outcomes[0].difference.n == 7, "its difference so far"
    # It lacks the seeds of the next look; with them it goes on.
    assert follow([[*near, -0.2], NOISE[:7]], LOOKS)[0].difference.n == 8


def test_the_last_look_ends_every_arm() -> None:
    near = [1.0, 1.2, 0.9, 1.1, 1.3, -0.4, -0.3, 0.2, -0.9]
    (outcome,) = follow([near], LOOKS)
    assert outcome.stopped in ("last", "hopeless")
    (outcome,) = follow([NOISE[:6]], one_look(6))
    assert outcome.stopped == "last"


def test_one_look_of_several_is_a_look_of_its_own() -> None:
    """The first look spends less than all: what it decides, a single test decides as well."""
    for seed in range(10):
        d = list(drawn(seed, 2, 6))
        for early, alone in zip(follow(d, spread_looks(6, 12)), follow(d, one_look(6)), strict=True):
            assert alone.difference.decided or not early.difference.decided
            assert early.difference.low <= alone.difference.low + 1e-9


def test_afterwards_no_arm_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is then the one that spends its error exactly, since no arm is given up."""
    for seed in range(4):
        d = list(drawn(seed, 3, 8))
        afterwards = follow(d, spread_looks(6, 8), afterwards=True)
        with monkeypatch.context() as patch:
            patch.setattr(joint_test, "HOPELESS", 0.0)
            assert follow(d, spread_looks(6, 8)) == afterwards


def test_afterwards_an_arm_that_lacks_seeds_keeps_its_outcome_and_the_others_go_on() -> None:
    near = [1.0, 1.2, 0.9, 1.1, 1.3, -0.4, 0.8, -0.2, 0.7]
    short, other, long = follow([NOISE[:7], near[:8], near], LOOKS, afterwards=True)
    assert (short.difference.n, other.difference.n, long.difference.n) == (7, 8, 9)
    at_first = follow([NOISE[:7], near[:7], near[:7]], LOOKS[:1], afterwards=True)
    assert short.difference == at_first[0].difference
    assert long.stopped == "last"
    # Without the word, all wait for the arm that lacks the seeds.
    assert {o.difference.n for o in follow([near[:7], near], LOOKS)} == {7}


@example([[0.0] * 8, [0.0] * 8, [0.003] * 8])
@given(families(least=8, most=8))
@settings(max_examples=20, deadline=None)
def test_verdict_and_interval_agree_at_every_look(family: list[list[float]]) -> None:
    for outcome in follow(family, spread_looks(6, 8)):
        assert (outcome.difference.p <= ALPHA) == outcome.difference.decided
        assert outcome.stopped is not None
        assert (outcome.stopped == "decided") == outcome.difference.decided
