"""The scripts behind docs/transfer.md: Kendall's tau of proxies, and the best rate of a width."""

import importlib.util
import sys
from types import ModuleType

import numpy as np
import pytest
from scipy import stats
from tests.support.folders import BENCHMARKS

from deltalab.errors import InputError
from deltalab.study.answers.ladder_trends import Size


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module


order, transfer = loaded("order"), loaded("transfer")


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
    found = {one.proxy: one for one in order.orders(scores, sizes, "real", 16.0)}
    assert {name: one.target for name, one in found.items()} == {
        "a.d=1": "real.d=1", "a.d=2": "real.d=2", "b.d=1": "real.d=1", "b.d=2": "real.d=2",
    }  # fmt: skip
    assert [found[name].tau for name in ("a.d=1", "a.d=2", "b.d=1")] == [1.0, 1.0, -1.0]
    assert found["a.d=1"].low == found["a.d=1"].ceiling == 1.0
    # Noise alone orders them by chance.
    assert found["b.d=2"].low < 0.5 < 1.0
    assert found["b.d=2"].high - found["b.d=2"].low > 0.3
    assert found["a.d=1"].times == pytest.approx(15.0)
    with pytest.raises(InputError, match="whole ladder of a, b, real"):
        order.orders(scores, sizes, "txt", 16.0)


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
