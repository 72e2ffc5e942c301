"""The curves page: the runs that an arm's line is of, its interval, and what is drawn; and what the pages remember."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from tests.support.ledgers import BASE, begin, charts, open_page, record, texts

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, Study, TrialRecord
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab_dashboard import cache, colors
from deltalab_dashboard.charts.curve_lines import Curves, curve_points, mean_points
from deltalab_dashboard.views import curves

MQAR = {"metric": "accuracy", "maximize": True, "chance": 0.0, "version": 1, "parameters": {"length": 10}}


@pytest.fixture
def candidates(store: Store) -> int:
    """One arm beside the base, with two candidates: each seed takes what the other found better."""
    arms = [ArmRecord(name, name == "base", {}, {}) for name in ("base", "other")]
    study = store.begin_study("two", None, "two", {"seeds": 2}, arms, {"tasks": {"mqar": MQAR}})
    for arm in ("base", "other"):
        for number, ends in enumerate(([0.9, 0.95], [0.97, 0.8])):
            runs = [
                RunRecord(seed, "done", None, [
                    ("validation", "accuracy", 50, 0.5), ("validation", "accuracy", 100, end),
                    ("test", "accuracy", 100, end - 0.1), ("test", "accuracy@10", 100, end),
                    ("test", "accuracy@40", 100, end / 2), ("cost", "flops_per_token", 100, 7.0),
                ])
                for seed, end in enumerate(ends, 1)
            ]  # fmt: skip
            trial = TrialRecord(
                f"{arm} {number}", "mqar", 1, "confirm", {"train": {"batch_size": 4}}, "done", 1e9, 1e9, 1.0,
                RuleRecord("comba", "9f" * 32, "S"), tokens_per_second=20.0, runs=runs,
            )  # fmt: skip
            store.record_trial(study, arm, trial, number, {})
    store.finish_study(study, "done")
    return study


def test_an_arm_is_drawn_by_the_run_that_each_seed_chose(store: Store, candidates: int) -> None:
    curves = Curves(store, store.study(candidates), store.arms(candidates), "mqar", "confirm")
    assert [(run.trial.number, run.seed) for run in curves.runs["other"]] == [(0, 1), (1, 2)]
    assert curves.means["other"] == pytest.approx((0.8 + 0.7) / 2)


def test_the_band_is_the_t_interval_of_the_mean_over_seeds(store: Store, candidates: int) -> None:
    curves = Curves(store, store.study(candidates), store.arms(candidates), "mqar", "confirm")
    points = store.curves(candidates, "mqar", "accuracy", "validation", trials=["other 0", "other 1"])
    found = mean_points(curve_points(curves, curves.runs["other"], points, "tokens", 0.0), ["arm", "step"], (0, 1))
    assert list(found["x"]) == [50 * 4 * 10, 100 * 4 * 10]
    low, high = stats.t.interval(0.95, 1, loc=0.85, scale=stats.sem([0.9, 0.8]))
    last = found.iloc[1]
    assert (last["smooth"], last["low"], last["high"]) == pytest.approx((0.85, max(low, 0), min(high, 1)))


@pytest.mark.parametrize(("axis", "rate"), [("step", 1), ("tokens", 40), ("seconds", 2), ("flops", 3 * 7 * 40)])
def test_a_step_counts_on_each_axis(store: Store, candidates: int, axis: str, rate: float) -> None:
    curves = Curves(store, store.study(candidates), store.arms(candidates), "mqar", "confirm")
    assert curves.rate(curves.trials["base"][0], axis) == rate


def test_smoothing_is_the_weighted_mean_of_a_run_so_far(store: Store, candidates: int) -> None:
    curves = Curves(store, store.study(candidates), store.arms(candidates), "mqar", "confirm")
    points = store.curves(candidates, "mqar", "accuracy", "validation", trials=["other 0"])
    found = curve_points(curves, curves.runs["other"][:1], points, "step", 0.5)
    assert list(found["smooth"]) == pytest.approx([0.5, (0.5 * 0.5 + 0.9) / 1.5])
    assert list(found["value"]) == [0.5, 0.9]


def test_one_seed_has_a_mean_and_no_interval() -> None:
    points = pd.DataFrame(
        {"arm": ["a"], "trial": ["t"], "seed": [1], "state": ["done"], "step": [1], "value": [0.5], "x": [1.0],
         "smooth": [0.5]}
    )  # fmt: skip
    found = mean_points(points, ["arm", "step"], None).iloc[0]
    assert found["smooth"] == 0.5
    assert np.isnan(found["low"])


def test_the_length_of_training_is_read_from_the_task() -> None:
    facts = {"metric": "accuracy", "maximize": True, "chance": 0.5}
    for parameters, length in (({"length": 32}, 32), ({"length_range": [3, 40]}, 39), ({}, None)):
        study = Study(provenance={"tasks": {"t": {**facts, "parameters": parameters}}})
        assert recorded_tasks(study)["t"].length == length


def test_a_metric_at_lengths_is_drawn_against_length(store: Store, candidates: int) -> None:
    app = open_page("curves.py", split="test")
    assert "The dashed line marks the length of training, 10." in texts(app)
    assert len(charts(app)) == 2
    assert charts(app)[1]["layer"][-1]["encoding"]["x"]["field"] == "length"


def test_the_address_restores_axes_smoothing_and_scales(store: Store, candidates: int) -> None:
    app = open_page("curves.py", axis="tokens", smoothing="0.5", logx="true", logy="true", seeds="false")
    [chart] = charts(app)
    first = chart["layer"][0]["encoding"]
    assert (first["x"]["title"], first["x"]["scale"]["type"]) == ("tokens of training", "log")
    assert first["y"]["scale"]["type"] == "log"
    assert "each point weighs 0.5 times the next" in texts(app)


def test_the_base_and_the_best_arms_are_drawn_at_first(store: Store) -> None:
    names = ["base", *(f"arm_{i}" for i in range(12))]
    study = begin(
        store, "many", changes={name: {} if name == "base" else {"x": [0, i]} for i, name in enumerate(names)}
    )
    for i, name in enumerate(names):
        record(store, study, name, "mqar", [value - 0.01 * i for value in BASE])
    [chart] = charts(open_page("curves.py"))
    assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == names[:6]
    color = charts(open_page("curves.py", others="true"))[0]["layer"][0]["encoding"]["color"]["scale"]
    assert color["domain"] == names
    assert set(color["range"][6:]) == {colors.OTHERS}, "the arms that are not highlighted are grey"


def test_a_click_in_the_legend_switches_an_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"chart": {"selection": {"clicked": [{"arm": "b"}, {"arm": "c"}]}}}
    monkeypatch.setattr(curves.st, "session_state", state)
    curves.switch("chart", ["a", "b"])
    assert state["arms"] == ["a", "c"]  # type: ignore[comparison-overlap]


def test_the_wheel_scrolls_the_page(store: Store, candidates: int) -> None:
    for chart in charts(open_page("curves.py", split="test")):
        zooms = [found["select"].get("zoom") for found in chart["params"] if found.get("bind") == "scales"]
        assert zooms == ["wheel![event.shiftKey]"]


def test_pages_read_each_trial_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    study = begin(store, "grows")
    record(store, study, "base", "mqar", BASE)
    with cache.CachedStore.open(store._engine.url.render_as_string(False), create=False) as pages:
        before, mark = pages.trials(study), pages.mark(study)
        record(store, study, "late", "mqar", [math.nan, *BASE[1:]])
        assert pages.mark(study) != mark
        asked = []
        read = Store.trials
        monkeypatch.setattr(
            Store, "trials", lambda self, *given, **named: asked.append(named) or read(self, *given, **named)
        )
        after = pages.trials(study)
        assert after == read(store, study)
        assert after[0] is before[0]
        assert asked == [{"trials": [after[1].key]}]
        assert pages.final_metrics(study) == store.final_metrics(study)
        assert pages.final_metrics(study, stage="tune") == []


def test_a_trial_that_ran_again_is_read_again(store: Store) -> None:
    study = begin(store, "again")
    record(store, study, "base", "mqar", [], state="failed", error="out of memory")
    with cache.CachedStore.open(store._engine.url.render_as_string(False), create=False) as pages:
        [failed] = pages.trials(study)
        store.forget_trial(failed.key)
        assert pages.trials(study) == []
        record(store, study, "base", "mqar", BASE)
        assert [trial.state for trial in pages.trials(study)] == ["done"]


def test_a_few_metrics_are_read_as_among_all(store: Store, ablation: int) -> None:
    every = store.final_metrics(ablation)
    some = {("test", "accuracy"), ("validation", "bits_per_byte")}
    assert store.final_metrics(ablation, metrics=some) == [one for one in every if (one.split, one.metric) in some]
    keys = {every[0].trial}
    assert store.final_metrics(ablation, trials=keys) == [one for one in every if one.trial in keys]
    assert {(its, task, split, metric) for its, task, split, metric in store.measured(ablation)} == {
        (one.stage, one.task, one.split, one.metric) for one in every
    }


def test_means_alone_are_drawn_from_zero_and_the_base_is_dashed(candidates: int) -> None:
    [chart, *_] = charts(open_page("curves.py"))
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["line", "text"]
    means, names = chart["layer"]
    assert means["encoding"]["x"]["scale"]["zero"]
    dashes = means["encoding"]["strokeDash"]["scale"]
    assert dict(zip(dashes["domain"], dashes["range"], strict=True)) == {"base": [7, 4], "other": [1, 0]}
    assert names["encoding"]["text"]["field"] == "arm", "no line is told by its colour alone"
    [chart, *_] = charts(open_page("curves.py", bands="true"))
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["area", "line", "text"]


def test_one_seed_can_be_picked(candidates: int) -> None:
    app = open_page("curves.py", seed="2")
    assert "A thick line is seed 2 of an arm" in texts(app)
    assert app.query_params["seed"] == "2"


def test_names_at_the_ends_of_lines_stand_apart() -> None:
    ends = [0.9, 0.899, 0.898, 0.1]
    means = pd.DataFrame({"arm": list("abcd"), "x": 5.0, "step": 5, "smooth": ends})
    placed = curves.line_ends(means, logarithmic=False).set_index("arm")["at"]
    assert list(placed.sort_values().index) == ["d", "c", "b", "a"]
    assert np.diff(placed.sort_values()).min() == pytest.approx(curves.APART * 0.8)
    assert placed["d"] == pytest.approx(0.1), "a name with room stays at its line"
