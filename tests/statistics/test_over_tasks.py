"""Means over tasks and their tests, against plain loops; the error of the tests where all arms are alike."""

import math
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import ALPHA
from deltalab.statistics.over_tasks import OverTasks
from deltalab.statistics.pairs import InterquartileContrast, Pairs
from deltalab.statistics.seed_choice import Run, Scores

Array = NDArray[np.float64]
NAMES = ("base", "a", "b", "c")


def scores(test: Array, validation: Array | None = None, *, maximize: bool = True, chance: float = 0.0) -> Scores:
    """The scores on a task: test and validation [arms, n, C]."""
    validation = test if validation is None else validation
    runs = {
        name: {
            c: {s + 1: Run(float(validation[j, s, c]), float(test[j, s, c])) for s in range(test.shape[1])}
            for c in range(test.shape[2])
        }
        for j, name in enumerate(NAMES[: len(test)])
    }
    return Scores("base", maximize, chance, runs, dict.fromkeys(runs, range(1, test.shape[1] + 1)))


def study(random: np.random.Generator, seeds: int, candidates: int) -> OverTasks:
    """Alike arms on an accuracy with chance 0.1, and on a loss whose noise is another."""
    accuracy, loss = (random.normal(size=(2, len(NAMES), seeds, candidates)) for _ in range(2))
    noisy = np.maximum(4 + loss, 0)
    return OverTasks(
        [
            scores(0.5 + 0.1 * accuracy[0], 0.5 + 0.1 * accuracy[1], chance=0.1),
            scores(noisy[0], noisy[1], maximize=False, chance=8.0),
        ],
        [1.0, 0.0],
        seeds,
    )


@pytest.mark.parametrize("candidates", [1, 3])
def test_results_are_on_the_scale_from_chance_to_perfect(candidates: int) -> None:
    over = study(np.random.default_rng(0), 6, candidates)
    accuracy, loss = over.scores
    for arm in NAMES:
        expected = [
            [(accuracy.results[arm][seed] - 0.1) / 0.9, (8 - loss.results[arm][seed]) / 8] for seed in range(1, 7)
        ]
        assert np.allclose(over.results(arm), expected, rtol=1e-12)


@pytest.mark.parametrize("candidates", [1, 3])
def test_differences_are_those_of_the_means_and_of_the_interquartile_means(candidates: int) -> None:
    over = study(np.random.default_rng(1), 7, candidates)
    found = over.differences(intervals=False)
    assert list(found) == ["a", "b", "c"]
    base = over.results("base")
    for arm, (mean, iqm) in found.items():
        assert mean.mean == pytest.approx(over.results(arm).mean() - base.mean())
        trimmed = (stats.trim_mean(over.results(x), 0.25, axis=None) for x in (arm, "base"))
        assert iqm.mean == pytest.approx(next(trimmed) - next(trimmed))


@pytest.mark.parametrize("candidates", [1, 2])
def test_an_exchange_takes_all_runs_of_a_seed_on_every_task(candidates: int) -> None:
    """And both interquartile means are computed anew."""
    random = np.random.default_rng(2)
    drawn = random.integers(-8, 9, size=(3, 2, 2, 4, candidates)) / 8  # task, arm or base, split, seed, candidate
    pairs = tuple(Pairs(Sample(*arm), Sample(*base)) for arm, base in drawn)
    signs = np.array([*product([1.0, -1.0], repeat=4)])
    for flip, found in zip(signs, InterquartileContrast(pairs).exchanged(signs), strict=True):
        sides: list[list[Array]] = [[], []]
        for both in drawn:
            mixed = both.copy()
            mixed[:, :, flip < 0] = both[::-1][:, :, flip < 0]
            for side, of_side in zip(sides, mixed, strict=True):
                side.append(Sample(*of_side).results())
        arm, base = (stats.trim_mean(np.array(side), 0.25, axis=None) for side in sides)
        assert found.mean() == pytest.approx(arm - base)


def test_a_better_loss_is_a_better_mean() -> None:
    random = np.random.default_rng(3)
    accuracy = 0.5 + 0.01 * random.normal(size=(2, 6, 1))
    loss = 4 + 0.01 * random.normal(size=(2, 6, 1))
    loss[1] -= 0.8
    over = OverTasks([scores(accuracy), scores(loss, maximize=False, chance=8.0)], [1.0, 0.0], 6)
    [(mean, _)] = over.differences().values()
    assert mean.decided
    assert mean.mean == pytest.approx(0.05, abs=0.02)


def test_only_the_first_seeds_count_and_only_arms_that_have_them() -> None:
    random = np.random.default_rng(4)
    one, two = (0.5 + 0.1 * random.normal(size=(3, 8, 1)) for _ in range(2))
    whole = OverTasks([scores(one[:, :6]), scores(two[:, :6])], [1.0, 1.0], 6)
    longer = OverTasks([scores(one), scores(two[:, :6])], [1.0, 1.0], 6)
    assert longer.differences() == whole.differences()
    assert longer.results("a").tolist() == whole.results("a").tolist()
    lacks = OverTasks([scores(one), scores(two[:2])], [1.0, 1.0], 6)
    assert lacks.arms == ["base", "a"]
    assert list(lacks.differences()) == ["a"]
    assert OverTasks([scores(one), scores(two)], [1.0, 1.0], 9).differences() == {}


@pytest.mark.slow
@pytest.mark.parametrize("candidates", [1, 3])
def test_alike_arms_are_told_from_the_base_in_one_study_of_twenty(candidates: int) -> None:
    random, studies = np.random.default_rng(5), 200
    wrong = np.zeros(2)
    for _ in range(studies):
        found = study(random, 7, candidates).differences(intervals=False).values()
        wrong += [any(both[i].p <= ALPHA for both in found) for i in range(2)]
    assert (wrong / studies < ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / studies)).all()
    assert (wrong > 0).all(), "a test that never errs would pass this"
