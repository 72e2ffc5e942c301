"""How benchmarks/measures.py scores a run by each measure, and what it finds of arms whose differences are known."""

import math

import numpy as np
import pytest
from tests.support.scripts import loaded

measures = loaded("measures")


def test_each_seed_takes_the_candidate_that_its_measure_chooses() -> None:
    """The first is more accurate at the end, the second has the smaller loss and learns sooner."""
    late = {"metric": [0.1, 0.2, 0.9, 0.8], "loss": [3.0, 2.0, 1.0, 1.1]}
    soon = {"metric": [0.3, 0.6, 0.7, 0.6], "loss": [2.0, 1.0, 0.5, 0.4]}
    table = measures.Table(maximize=True, runs={"base": [[late, None], [soon, soon]]})
    expected = {
        "metric": [0.8, 0.6],
        "loss": [-0.4, -0.4],
        "log_loss": [-math.log(0.4)] * 2,
        "curve_metric": [1.6 / 3] * 2,
        "curve_loss": [-3.5 / 3] * 2,
        "curve_log_loss": [0.0, 0.0],
        "log_steps": [-math.log(2 / 3)] * 2,
    }
    assert list(expected) == list(measures.MEASURES)
    for measure, scores in expected.items():
        assert table.scores(measure)[0] == pytest.approx(scores), measure
    assert table.scores("metric", own=False)[0] == pytest.approx([0.8, 0.6]), "the best mean, for all seeds"


def test_a_run_that_diverged_has_the_worst_score() -> None:
    run = {"metric": [0.5, 0.5], "loss": [1.0, 1.0]}
    worse = {"metric": [0.3, 0.2], "loss": [1.5, 1.5]}
    table = measures.Table(maximize=True, runs={"base": [[run, None]], "arm": [[worse, run]]})
    assert table.scores("metric") == pytest.approx(np.array([[0.5, 0.2], [0.2, 0.5]]))


def test_the_ratio_is_that_of_the_true_arms() -> None:
    """A seed's luck that all arms share, such as a good start, is no noise of a difference."""
    random, means = np.random.default_rng(0), np.linspace(-2, 2, 9)[:, None]
    scores = means + random.normal(size=(1, 4000)) + 0.5 * random.normal(size=(9, 4000))
    found = measures.figures(scores)
    assert found["noise"] == pytest.approx(0.5, rel=0.02)
    assert found["signal"] == pytest.approx(means.std(ddof=1), rel=0.01)
    assert found["correlation"] == pytest.approx(1 / 1.25, abs=0.02)
    assert measures.ratio(scores) == pytest.approx(found["signal"] / found["noise"])
    gain = measures.gain(scores[:, :12], scores[:, :12] + random.normal(size=(9, 12)))
    assert gain["gain_low"] < gain["gain"] < gain["gain_high"]
    assert gain["gain"] > 1


def test_equal_arms_have_no_signal() -> None:
    scores = np.random.default_rng(2).normal(size=(6, 4000))
    assert measures.ratio(scores) < 0.05


def test_a_plan_counts_with_the_spread_that_a_report_has() -> None:
    """A seed that chooses for itself avoids the rate at which it alone fails; a report's seeds do not know of it."""
    ledger = next(file for file, address, _ in measures.LEDGERS if address == "comba_ablation:gpu")
    recall = measures.recorded_tables(ledger, "comba_ablation:gpu")["mqar"]
    assert recall.spread is not None
    own = measures.figures(recall.table.scores("metric"))
    assert recall.spread[0] > 4 * own["sd"]
    group = {"figures": {"metric": own, "loss": {"sd": 0.5, "correlation": 0.2}}, "spread": [*recall.spread]}
    assert measures.spread_for_plans(group, "metric") == recall.spread
    assert measures.spread_for_plans(group, "loss") == (0.5, 0.2)
    assert measures.spread_for_plans({**group, "spread": None}, "metric") == (own["sd"], own["correlation"])
