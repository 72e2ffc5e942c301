"""The interquartile mean and the parts of its seeds, against SciPy's trimmed mean and plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deltalab.statistics.interquartile import interquartile_parts


def parts(scores: list[list[float]]) -> list[float]:
    """The parts of the seeds, in plain loops."""
    every = sorted(x for seed in scores for x in seed)
    cut = len(every) // 4
    middle = every[cut : len(every) - cut]
    inside = [math.fsum(min(max(x, middle[0]), middle[-1]) for x in seed) / len(seed) for seed in scores]
    mean, away = math.fsum(middle) / len(middle), math.fsum(inside) / len(inside)
    return [mean + len(every) / len(middle) * (own - away) for own in inside]


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_the_parts_are_those_of_plain_loops(seeds: int, tasks: int, draw: int) -> None:
    """And their mean is rliable's IQM: `scipy.stats.trim_mean(scores, 0.25, axis=None)`."""
    scores = np.random.default_rng(draw).integers(0, 9, size=(2, seeds, tasks)) / 8
    found = interquartile_parts(scores)
    assert found.shape == (2, seeds)
    for own, expected in zip(found, scores, strict=True):
        assert own.tolist() == pytest.approx(parts(expected.tolist()))
        assert own.mean() == pytest.approx(stats.trim_mean(expected, 0.25, axis=None))


def test_no_run_that_stands_apart_moves_it() -> None:
    scores = np.linspace(0, 1, 12).reshape(6, 2)
    far = scores.copy()
    far[0, 0] = -1e6
    assert interquartile_parts(far).tolist() == interquartile_parts(scores).tolist()


def test_the_parts_spread_as_the_mean_of_other_seeds_would() -> None:
    """Their standard error is the standard deviation of the IQM over many studies, also if seeds share luck."""
    random = np.random.default_rng(0)
    scores = 0.5 * random.normal(size=(4000, 20, 1)) + random.normal(size=(4000, 20, 3)) + [0.0, 1.0, 2.0]
    found = interquartile_parts(scores)
    errors = found.std(-1, ddof=1) / math.sqrt(20)
    assert np.sqrt((errors**2).mean()) == pytest.approx(found.mean(-1).std(), rel=0.05)
