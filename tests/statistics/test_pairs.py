"""Exchanges of whole seeds and the weights after them, against plain loops, and the errors of a test of such pairs."""

import math
import tracemalloc
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltalab.statistics import pairs
from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import ALPHA, compare, flips, follow, one_look
from deltalab.statistics.pairs import Contrast, Pairs

Array = NDArray[np.float64]


def by_hand(validation: list[list[float]], test: list[list[float]], maximize: bool) -> list[float]:
    """The results of the seeds, in plain loops."""
    results, sign = [], 1 if maximize else -1
    for seed in range(len(test)):
        others = [row for other, row in enumerate(validation) if other != seed] or [validation[seed]]
        candidates, n = range(len(test[seed])), len(others)
        means = [sign * math.fsum(row[c] for row in others) / n for c in candidates]
        best = means.index(max(means))
        variances = []
        for c in candidates:
            d = [sign * (row[best] - row[c]) for row in others]
            if c != best and n > 1:
                variances.append(sum((x - sum(d) / n) ** 2 for x in d) / (n - 1) / n)
        error = math.sqrt(sorted(variances)[(len(variances) - 1) // 2]) if variances else 0.0
        gaps = [means[best] - mean for mean in means]
        weights = [math.exp(-gap / error) if error else float(gap == 0) for gap in gaps]
        results.append(sum(w * x for w, x in zip(weights, test[seed], strict=True)) / sum(weights))
    return results


def drawn(random: np.random.Generator, seeds: int, candidates: int, maximize: bool = True) -> Pairs:
    """Pairs whose scores are multiples of 1/8, so that sums are exact and ties are frequent."""
    scores = random.integers(-8, 9, size=(4, seeds, candidates)) / 8
    return Pairs(Sample(scores[0], scores[1], maximize), Sample(scores[2], scores[3], maximize))


@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_exchanged_pairs_are_weighed_anew(seeds: int, candidates: int, maximize: bool, draw: int) -> None:
    """Also with a number subtracted from the arm's scores, which the test only subtracts from the differences."""
    pairs = drawn(np.random.default_rng(draw), seeds, candidates, maximize)
    signs = np.array([*product([1.0, -1.0], repeat=seeds)])
    for shift in (0.0, 0.375):
        found = pairs.exchanged(signs) - shift * signs
        for flip, differences in zip(signs, found, strict=True):
            arm, base = pairs.arm.shifted(-shift), pairs.base
            mixed = [
                [
                    [(one if sign > 0 else other)[seed].tolist() for seed, sign in enumerate(flip)]
                    for one, other in ((getattr(a, split), getattr(b, split)) for split in ("validation", "test"))
                ]
                for a, b in ((arm, base), (base, arm))
            ]
            own, others = (by_hand(validation, test, maximize) for validation, test in mixed)
            assert differences == pytest.approx([x - y for x, y in zip(own, others, strict=True)], abs=1e-9)


def test_a_contrast_exchanges_all_of_its_pairs() -> None:
    random = np.random.default_rng(0)
    parts = tuple(drawn(random, 4, 3) for _ in range(2))
    signs = np.array([*product([1.0, -1.0], repeat=4)])
    found = Contrast(parts, (1.0, -0.5))
    assert found.exchanged(signs) == pytest.approx(parts[0].exchanged(signs) - 0.5 * parts[1].exchanged(signs))
    assert (found.differences == found.exchanged(np.ones((1, 4)))[0]).all()
    by_hand_of_three = parts[0].head(3).differences - 0.5 * parts[1].head(3).differences
    assert found.head(3).differences == pytest.approx(by_hand_of_three)


def test_an_arm_without_tuning_may_be_held_against_one_that_tunes() -> None:
    random = np.random.default_rng(1)
    one, several = drawn(random, 6, 1).arm, drawn(random, 6, 3).base
    pairs = Pairs(one.widened(3), several)
    assert pairs.differences == pytest.approx(one.results() - several.results())
    assert pairs.exchanged(np.ones((1, 6)))[0] == pytest.approx(pairs.differences)


def tuned(random: np.random.Generator, spread: Array, seeds: int = 7) -> list[Pairs]:
    """Pairs of equal arms with three candidates, the second of them the best. `spread` has the sd of base and arms."""
    luck = random.normal(size=(len(spread), seeds, 3)) * spread[:, None, None] - np.array([1.0, 0.0, 1.0])
    validation, test = (luck + 0.2 * random.normal(size=luck.shape) for _ in range(2))
    base = Sample(validation[0], test[0])
    return [Pairs(Sample(v, t), base) for v, t in zip(validation[1:], test[1:], strict=True)]


def errors(spread: Array, studies: int, *, exchange: bool) -> float:
    """The share of studies of equal arms that find a difference, by exchanges or by flips of differences."""
    random, wrong = np.random.default_rng(3), 0
    for _ in range(studies):
        pairs = tuned(random, spread)
        outcomes = follow(pairs if exchange else [p.differences for p in pairs], one_look(7), intervals=False)
        wrong += any(outcome.difference.p <= ALPHA for outcome in outcomes)
    return wrong / studies


@pytest.mark.slow
@pytest.mark.parametrize("noisy", [1.0, 2.0])
def test_studies_of_equal_arms_keep_their_promise_and_flips_of_differences_do_not(noisy: float) -> None:
    spread, studies = np.array([1.0, 1.0, 1.0, noisy]), 400
    assert errors(spread, studies, exchange=True) <= ALPHA + 2.5 * math.sqrt(ALPHA * (1 - ALPHA) / studies)
    assert errors(spread, studies, exchange=False) > 0.1, "seeds share a choice, and flips take them for independent"


def test_an_interval_of_tuned_arms_leaves_out_0_exactly_where_p_is_small() -> None:
    random = np.random.default_rng(4)
    for effect in (0.0, 1.0, 2.0, 4.0):
        pairs = tuned(random, np.ones(4))
        shifted = [Pairs(p.arm.shifted(effect), p.base) for p in pairs]
        for before, after in zip(compare(pairs), compare(shifted), strict=True):
            assert (after.p <= ALPHA) == (after.low > 0 or after.high < 0)
            assert after.mean == pytest.approx(before.mean + effect)


def test_an_arm_whose_runs_diverge_does_not_widen_the_intervals_of_others() -> None:
    """One of its runs ends, at the lowest rate. Most runs of every arm diverge at the highest rate."""
    random, widths = np.random.default_rng(0), []
    for _ in range(4):
        scores = random.normal(size=(6, 7, 5)) - [6.0, 3.0, 0.5, 0.0, 0.0]
        gone = random.random(scores.shape) < [0.0, 0.0, 0.0, 0.0, 0.8]
        gone[-1] = True
        gone[-1, -1, 0] = False
        base, *arms = (Sample(of_arm, of_arm) for of_arm in np.where(gone, -500.0, scores))
        found, alone = (compare([Pairs(arm, base) for arm in family]) for family in (arms, arms[:-1]))
        assert found[-1].decided
        widths.append([np.mean([d.high - d.low for d in family[:4]]) for family in (found, alone)])
    beside, without = np.mean(widths, axis=0)
    assert beside < 1.25 * without


def test_exchanges_are_weighed_in_parts_that_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts change no bit, while an array of all exchanges of 12 seeds with 50 candidates takes 10 to 20 MB."""
    draw, signs = np.random.default_rng(0), flips(12)
    arm, base = (Sample(draw.normal(size=(12, 50)), draw.normal(size=(12, 50))) for _ in range(2))
    tracemalloc.start()
    found = Pairs(arm, base).exchanged(signs)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.shape == signs.shape
    assert peak < 60e6
    monkeypatch.setattr(pairs, "AT_ONCE", 2**30)
    assert Pairs(arm, base).exchanged(signs[:300]).tobytes() == found[:300].tobytes()
