"""The scripts behind docs/transfer.md: Kendall's tau of proxies, and the best rate of a width."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from tests.support.folders import BENCHMARKS, DOCS
from tests.support.scripts import loaded

from deltalab.errors import InputError
from deltalab.study.answers.ladder_trends import Size

kendall, order, transfer, trends = (loaded(name) for name in ("kendall", "order", "transfer", "trends"))


def test_tau_is_scipys() -> None:
    random = np.random.default_rng(0)
    x, y = random.integers(5, size=(2, 20, 9)).astype(float)
    found = order.tau(x, y)
    assert found == pytest.approx([stats.kendalltau(a, b).statistic for a, b in zip(x, y, strict=True)])


def test_each_proxy_is_held_against_text_of_16_times_its_compute() -> None:
    noise = 0.01 * np.random.default_rng(0).normal(size=(6, 8, 7))
    rising = np.arange(8.0)[:, None]
    scores = {
        "a.d=1": rising + noise[0], "a.d=2": rising + noise[1], "b.d=1": -rising + noise[2],
        "b.d=2": 0 * rising + noise[3], "real.d=1": rising + noise[4], "real.d=2": rising + noise[5],
    }  # fmt: skip
    sizes = {
        task: [Size(f"{task}.d={i + 1}", {"model.d_model": i + 1}, compute * 4.0**i) for i in range(2)]
        for task, compute in (("a", 1.0), ("b", 1.0), ("real", 15.0))
    }
    found = {one.proxy: one for one in order.orders(scores, order.pairs(sizes, "real", 16.0))}
    assert {name: one.target for name, one in found.items()} == {
        "a.d=1": "real.d=1", "a.d=2": "real.d=2", "b.d=1": "real.d=1", "b.d=2": "real.d=2",
    }  # fmt: skip
    assert [found[name].tau for name in ("a.d=1", "a.d=2", "b.d=1")] == [1.0, 1.0, -1.0]
    assert found["a.d=1"].low == found["a.d=1"].measured == found["a.d=1"].ceiling == 1.0
    # Noise alone orders them by chance, and any order may be the true one.
    assert found["b.d=2"].low < -0.8
    assert found["b.d=2"].high > 0.8
    assert found["a.d=1"].times == pytest.approx(15.0)
    with pytest.raises(InputError, match="whole ladder of a, b, real"):
        order.pairs(sizes, "txt", 16.0)


@pytest.mark.slow
@pytest.mark.parametrize("discordant", [0, 4])
def test_the_noise_of_seeds_does_not_pull_tau_to_zero(discordant: int) -> None:
    """Nine arms, six seeds, arms one sd apart. A bootstrap of the measured tau covers the true one in 0 and 50%."""
    random, truth, studies = np.random.default_rng(3), 1 - discordant / 18, 60
    measured, found = [], []
    for _ in range(studies):
        x, y = np.sort(random.normal(size=(2, 9)), axis=1)
        for i in 2 * np.arange(discordant):  # Neighbours whose order the other task turns around.
            y[[i, i + 1]] = y[[i + 1, i]]
        of_x, of_y = (means[:, None] + random.normal(size=(9, 6)) for means in (x, y))
        measured.append(float(kendall.tau(of_x.mean(1), of_y.mean(1))))
        found.append(kendall.true_tau(of_x, of_y))
    assert np.mean([one.low - 1e-9 <= truth <= one.high + 1e-9 for one in found]) >= 0.92
    assert np.mean(measured) < truth - 0.15
    assert abs(np.mean([one.tau for one in found]) - truth) < abs(np.mean(measured) - truth) / 2
    assert np.median([one.high - one.low for one in found]) < 1.2


def test_tau_of_arms_far_apart_is_that_of_their_means() -> None:
    random = np.random.default_rng(4)
    x, y = 10.0 * np.array([[0, 1, 2, 3, 4], [1, 0, 2, 4, 3]])
    found = kendall.true_tau(*(means[:, None] + random.normal(size=(5, 4)) for means in (x, y)))
    assert (found.low, found.tau, found.high) == pytest.approx((0.6, 0.6, 0.6))


def test_arms_that_all_score_the_same_have_no_order() -> None:
    found = kendall.true_tau(np.zeros((5, 4)), np.random.default_rng(5).normal(size=(5, 4)))
    assert math.isnan(found.tau)
    assert (found.low, found.high) == (-1.0, 1.0)


@pytest.mark.parametrize("name", ["order_h100", "order_proxies_h200"])
def test_a_recorded_study_gives_its_table_again(name: str, tmp_path: Path) -> None:
    out, page = tmp_path / "order.json", tmp_path / "transfer.md"
    published = (DOCS / "transfer.md").read_text(encoding="utf-8")
    page.write_text(
        re.sub(r"(<!-- order \S+ -->\n).*?(<!-- end -->)", r"\1\2", published, flags=re.DOTALL), encoding="utf-8"
    )
    recorded = BENCHMARKS / f"{name}.json"
    order.main(["--recorded", str(recorded), "--out", str(out), "--page", str(page)])
    assert json.loads(out.read_text()) == json.loads(recorded.read_text())
    region = re.compile(rf"<!-- order {json.loads(recorded.read_text())['study']} -->.*?<!-- end -->", re.DOTALL)
    assert region.findall(page.read_text(encoding="utf-8")) == region.findall(published)
    assert len(region.findall(published)) == 1


def test_an_arm_is_left_out_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    recorded = str(BENCHMARKS / "order_h100.json")
    order.main(["--recorded", recorded, "--without", "attention"])
    assert "| attention |" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        order.main(["--recorded", recorded, "--without", "atention"])
    assert "no arm atention, but base, attention" in capsys.readouterr().err


def test_the_best_rate_lies_between_those_tried() -> None:
    rates = [0.01 * 2.0**i for i in range(5)]
    found = {f"{rate:.4g}": 1 + (np.log(rate) - np.log(0.03)) ** 2 for rate in rates}
    assert transfer.best_rate(found) == pytest.approx(0.03, rel=1e-3)
    assert transfer.best_rate({"0.01": 1.0, "0.02": 2.0, "0.04": 3.0}) is None
    assert transfer.best_rate({"0.01": 3.0, "0.02": 2.0, "0.04": None}) == pytest.approx(0.02)


def test_rates_are_summed_up_by_their_spread() -> None:
    given = {"rules": ["gla"], "tasks": {"text": {}}, "widths": [32, 64]}
    peak = {
        0.01: {"0.005": 2.0, "0.01": 1.0, "0.02": 2.0, "0.04": 3.0},
        0.02: {"0.005": 3.0, "0.01": 2.0, "0.02": 1.0, "0.04": 2.0},
    }
    found = {"gla/text/none/32": peak[0.02], "gla/text/none/64": peak[0.01], "gla/text/mup/64": peak[0.02]}
    rows = {row["parametrization"]: row for row in transfer.summary(given, found)}
    assert rows["none"]["spread"] == pytest.approx(2.0)
    assert rows["mup"]["spread"] == pytest.approx(1.0)


def test_trends_find_a_gain_that_stays_and_one_that_ends() -> None:
    """Losses of 1 + C^-1/2 and more by what the arms differ in."""
    random = np.random.default_rng(0)
    loss = {width: 1 + width**-0.5 for width in (1, 10, 100, 1000)}
    worse = {"base": lambda w: 0.0, "deltanet": lambda w: 0.05, "kda": lambda w: 0.05 - 0.06 * math.log10(w) / 3}
    arms = {arm for claim in trends.CLAIMS for arm in (claim.arm, claim.against)}
    scores = {
        f"{task}.d={width}": {
            arm: -(loss[width] + worse.get(arm, worse["base"])(width) + 1e-3 * random.normal(size=7)) for arm in arms
        }
        for task in {claim.task for claim in trends.CLAIMS}
        for width in loss
    }
    compute = {(label, arm): float(label.rpartition("=")[2]) for label in scores for arm in arms}
    found = {(trend.claim.task, trend.claim.says): trend for trend in trends.trends(scores, compute)}
    stays = found["real_text", "Gated DeltaNet is better than DeltaNet"]
    assert stays.verdict == "holds"
    assert stays.prediction.agrees
    ends = found["real_text", "KDA is better than Gated DeltaNet"]
    assert ends.verdict == "reverses"
    assert [round(difference.mean, 2) for difference in ends.differences] == [-0.05, -0.03, -0.01, 0.01]
    assert found["real_text", "Comba is better than Gated DeltaNet"].verdict == "not decidable"
    assert found["mqar", "DeltaNet is better than linear attention"].prediction is None
    assert "| **-0.0" in trends.markdown([ends])
    assert "missed |" in trends.markdown([ends])


def test_the_page_has_the_recorded_trends() -> None:
    recorded = json.loads((BENCHMARKS / "trends_h100.json").read_text())["trends"]
    page = (DOCS / "transfer.md").read_text()
    for trend in recorded:
        assert all(f"{difference['mean']:+.3f}" in page for difference in trend["differences"])
