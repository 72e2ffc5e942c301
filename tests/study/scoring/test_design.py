"""The design of scores: the error that all confirmations spend, fresh seeds, and the test of one confirmation."""

import numpy as np
import pytest

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import ALPHA
from deltalab.statistics.pairs import Pairs
from deltalab.study.scoring import design
from deltalab.study.specs.study_file import LAST_FIRST_SEED


def test_all_confirmations_together_spend_no_more_than_was_promised() -> None:
    spent = [design.alpha_of(number) for number in range(1, 10_000)]
    assert spent == sorted(spent, reverse=True), "a proposal that is repeated never meets an easier test"
    assert 0.99 * ALPHA < sum(spent) <= ALPHA


def test_no_two_confirmations_share_a_seed() -> None:
    for number in range(1, 1000):
        assert 2 <= design.seeds_of(number) <= design.MOST_SEEDS
        assert design.first_seed_of(number) + design.MOST_SEEDS == design.first_seed_of(number + 1)
    assert design.first_seed_of(1) > 1000
    assert design.first_seed_of(9_000) <= LAST_FIRST_SEED


@pytest.mark.parametrize("candidates", [1, 3])
def test_p_is_at_most_alpha_for_a_share_of_alpha_of_all_noise(candidates: int) -> None:
    """With tuning, too: a seed's runs are weighed by the other seeds."""
    draw, alpha, repeats = np.random.default_rng(0), 0.05, 400

    def sample() -> Sample:
        return Sample(draw.normal(size=(8, candidates)), draw.exponential(size=(8, candidates)))

    found = sum(design.p_of(Pairs(sample(), sample()), 1, alpha) <= alpha for _ in range(repeats))
    assert abs(found / repeats - alpha) < 4 * (alpha * (1 - alpha) / repeats) ** 0.5


def test_p_is_the_share_of_all_exchanges() -> None:
    """Of the 2^6 exchanges of six seeds, 2 have a gain as high as the observed one."""
    pairs = Pairs.plain([1.0, 1.1, 1.2, 1.3, 1.4, 0.0])
    assert design.p_of(pairs, 1, 1e-3) == pytest.approx(2 / 2**6, rel=0.2)
    assert design.p_of(Pairs.plain(-pairs.differences), -1, 1e-3) == design.p_of(pairs, 1, 1e-3)
    assert design.p_of(pairs, -1, 1e-3) == 1.0


def test_what_equals_the_base_is_not_promising_and_has_no_low_p() -> None:
    assert not design.is_promising(np.zeros(7))
    assert design.is_promising(np.full(7, 0.1))
    assert design.p_of(Pairs.plain(np.zeros(20)), 1, 1e-4) == 1.0
