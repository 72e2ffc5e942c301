"""Intervals of differences item by item hold together in 95% of simulated evaluations, and p agrees with them."""

import numpy as np
import pytest

from deltalab.statistics import paired_items
from deltalab.statistics.joint_test import Difference
from deltalab.statistics.paired_items import ItemPairs, compare_items

ITEMS, TASKS, MODELS = 100, 4, 2
Simulated = tuple[list[ItemPairs], list[float]]


def scored(values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    return np.stack([values, np.ones(len(values)) if weights is None else weights], 1)


def losses(random: np.random.Generator) -> Simulated:
    """Losses of texts of unequal length, whose difficulty all models share."""
    pairs = []
    for task in range(TASKS):
        ids = [f"{task} {i}" for i in range(ITEMS)]
        words, hard = random.integers(5, 50, ITEMS).astype(float), random.normal(size=ITEMS)
        base = hard + random.normal(size=ITEMS)
        for model in range(MODELS):
            other = hard + random.normal(0, 1 + model, ITEMS) + 0.5
            pairs.append(ItemPairs(ids, scored(words * (9 + base), words), scored(words * (9 + other), words)))
    return pairs, [0.5] * len(pairs)


def answers(random: np.random.Generator) -> Simulated:
    """Answers of which the other models lose 3%, and win none."""
    pairs = []
    for task in range(TASKS):
        ids, base = [f"{task} {i}" for i in range(ITEMS)], random.random(ITEMS) < 0.6
        for _ in range(MODELS):
            other = base & (random.random(ITEMS) >= 0.05)
            pairs.append(ItemPairs(ids, scored(base.astype(float)), scored(other.astype(float))))
    return pairs, [-0.03] * len(pairs)


def skewed(random: np.random.Generator) -> Simulated:
    """Losses that differ by lognormal values, upwards of one model and downwards of the other."""
    pairs = []
    for task in range(TASKS):
        ids, hard = [f"{task} {i}" for i in range(ITEMS)], random.normal(9, 1, ITEMS)
        for sign in (1, -1):
            pairs.append(ItemPairs(ids, scored(hard), scored(hard + sign * random.lognormal(size=ITEMS))))
    return pairs, [float(np.exp(0.5)), -float(np.exp(0.5))] * TASKS


def held(found: list[Difference], truth: list[float]) -> bool:
    return all(one.low <= true <= one.high for one, true in zip(found, truth, strict=True))


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired_items, "DRAWS", 2000)


@pytest.mark.parametrize("draw", [losses, answers, skewed])
def test_all_intervals_hold_together(draw: object) -> None:
    """0.92 is 2.5 standard errors of 500 evaluations below 0.95."""
    random, together, apart = np.random.default_rng(3), 0, 0
    for _ in range(500):
        pairs, truth = draw(random)  # type: ignore[operator]
        found = compare_items(pairs)
        together += held(found, truth)
        assert all((one.p <= 0.05) == one.decided for one in found)
        if draw is losses:
            apart += held([compare_items([pair])[0] for pair in pairs], truth)
    assert together / 500 >= 0.92
    if draw is losses:
        assert together / 500 <= 0.98, "the intervals are no longer than they must be"
        assert apart / 500 < 0.85, "eight intervals of 95% each do not hold together"


def test_an_interval_is_longer_where_the_items_have_their_tail() -> None:
    random = np.random.default_rng(4)
    ids, base, tail = [str(i) for i in range(60)], random.normal(size=60), random.lognormal(size=60)
    [up], [down] = (compare_items([ItemPairs(ids, scored(base), scored(base + sign * tail))]) for sign in (1, -1))
    assert up.high - up.mean > 1.5 * (up.mean - up.low)
    assert (down.low, down.high, down.p) == pytest.approx((-up.high, -up.low, up.p))
    [even] = compare_items([ItemPairs(ids, scored(base), scored(base + np.linspace(-1, 2, 60)))])
    assert even.high - even.mean == pytest.approx(even.mean - even.low)


def test_scores_that_all_agree_leave_room_for_the_next_item() -> None:
    ids, right = [str(i) for i in range(64)], scored(np.ones(64))
    [same] = compare_items([ItemPairs(ids, right, right)])
    assert (same.mean, same.p) == (0.0, 1.0)
    assert 3 / 64 < same.high < 5 / 64, "a little more than the 3 / n of the rule of three"
    nats = scored(np.linspace(2, 3, 64))
    [same] = compare_items([ItemPairs(ids, nats, nats)])
    assert (same.low, same.high) == (0.0, 0.0), "a loss that is equal to the last digit is that of the same model"


def test_metrics_that_say_the_same_twice_cost_nothing() -> None:
    random = np.random.default_rng(5)
    ids, base, other = [str(i) for i in range(200)], random.normal(5, 1, 200), random.normal(5.1, 1, 200)
    nats = ItemPairs(ids, scored(base), scored(other))
    bits = ItemPairs(ids, scored(base * 1.44), scored(other * 1.44))
    elsewhere = ItemPairs([f"other {item}" for item in ids], nats.first, nats.other)

    def length(found: list[Difference]) -> float:
        return found[0].high - found[0].low

    alone, twice, two = (compare_items(pairs) for pairs in ([nats], [nats, bits], [nats, elsewhere]))
    assert length(twice) == pytest.approx(length(alone), rel=0.03)
    assert length(two) > 1.1 * length(alone)


def test_an_item_that_stands_twice_is_one_item() -> None:
    random = np.random.default_rng(6)
    ids, base, other = [str(i) for i in range(50)], random.normal(5, 1, 50), random.normal(5, 1, 50)
    once = compare_items([ItemPairs(ids, scored(base), scored(other))])[0]
    twice = compare_items([ItemPairs(ids * 2, scored(np.tile(base, 2)), scored(np.tile(other, 2)))])[0]
    assert (twice.mean, twice.low, twice.n) == (pytest.approx(once.mean), pytest.approx(once.low), 50)
