"""The pages Search and Sensitivity, on ledgers whose every figure is known."""

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.support.ledgers import BASE, begin, cells, charts, open_page, record, texts
from tests.support.search_ledger import record_search

from deltalab.store import Store
from deltalab.study.answers import importance
from deltalab.study.specs.sections.search_space import Search
from deltalab_dashboard.charts.candidate_settings import by_all_settings, by_setting, by_two_settings
from deltalab_dashboard.charts.candidates import CandidateTable, by_objectives


@pytest.fixture
def searched(store: Store, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(importance, "TREES", 8)
    return record_search(store)


def test_the_page_says_what_was_found_and_how_to_open_it_in_optuna(searched: int) -> None:
    app = open_page("search.py")
    assert not app.code, "the view Method has the commands"
    assert "The best accuracy on validation is 0.900, by found_1 (fast start). The base, tuned, has 0.700." in texts(
        app
    )
    front = cells(app.table[0].value)
    assert front["what it is"] == ["", "fast start", "no decay"]
    assert [code.value for code in open_page("search.py", view="Method").code] == [
        "pip install optuna-dashboard\ndeltalab study export-optuna s s.optuna.db\n"
        "optuna-dashboard sqlite:///s.optuna.db"
    ]


def test_a_candidate_has_the_name_that_the_report_gives_it(searched: int) -> None:
    [trials] = open_page("trials.py").dataframe
    assert {"candidate 7", "random candidate 7", "warm candidate 1", "base, training 0", "found_1, training 0"} < {
        *trials.value["trial"]
    }
    app = open_page("trial.py", trial="base 1000007 20 1010.0")
    assert app.subheader[0].value.replace("\\", "") == "random candidate 7 on mqar"


def test_every_chart_of_a_search_is_there(searched: int) -> None:
    [front] = charts(open_page("search.py"))
    settings, setting, two_settings = charts(open_page("search.py", view="Settings"))
    [importances] = charts(open_page("search.py", view="What mattered"))
    [growth] = charts(open_page("search.py", view="Method"))
    assert importances["layer"][0]["encoding"]["y"]["field"] == "path"
    assert [layer["mark"]["type"] for layer in front["layer"]][:3] == ["line", "point", "text"]
    assert settings["layer"][0]["encoding"]["detail"]["field"] == "candidate"
    assert setting["layer"][0]["encoding"]["x"]["title"] == "rule.decay", "what explains most stands first"
    assert two_settings["mark"]["type"] == "rect"
    assert growth["encoding"]["x"]["field"] == "candidates"


def test_the_url_restores_the_views_of_a_search(searched: int) -> None:
    asked = {"objective": "state_size", "against": "accuracy", "zoom": "true"}
    app = open_page("search.py", **asked)
    [front] = charts(app)
    assert front["layer"][1]["encoding"]["y"]["title"] == "state_size (lower is better)"
    assert front["layer"][1]["encoding"]["x"]["title"] == "accuracy (higher is better)"
    assert {key: app.query_params[key] for key in asked} == asked
    asked = {
        "view": "Settings",
        "highlight": "The best tenth by accuracy",
        "setting": "train.lr",
        "score": "flops_per_token",
        "across": "rule.start",
        "down": "train.lr",
    }
    app = open_page("search.py", **asked)
    _, setting, two_settings = charts(app)
    assert setting["layer"][0]["encoding"]["x"]["scale"]["type"] == "log"
    assert setting["layer"][0]["encoding"]["y"]["title"] == "flops_per_token (lower is better)"
    assert two_settings["encoding"]["x"]["title"] == "rule.start"
    assert app.selectbox(key="highlight").value == "The best tenth by accuracy"
    assert "have no rule.start, and are left out" in texts(app)
    assert {key: app.query_params[key] for key in asked} == asked


def test_scores_are_linear_and_the_zoom_reaches_to_the_finalists() -> None:
    far = row("7", "dominated", 0.001, 100_000, rule_decay="none", train_lr=0.5)
    wide = replace(TABLE, rows=[*TABLE.rows, far])
    for zoomed, ends in ((False, [0.001, 0.9]), (True, [0.5, 0.9])):
        drawn = by_objectives(wide, "accuracy@mqar", "flops_per_token", zoomed=zoomed)
        assert drawn is not None
        encoding = drawn[0].to_dict()["layer"][1]["encoding"]
        assert (encoding["y"]["scale"]["type"], encoding["y"]["scale"]["domain"]) == ("linear", ends)
        assert encoding["x"]["scale"]["type"] == ("linear" if zoomed else "log"), "a cost"


def test_names_of_arms_do_not_cover_one_another() -> None:
    near = [row(f"found_{at}", "finalist", 0.9, 200 + at / 1000, rule_decay="none", train_lr=0.5) for at in range(5)]
    drawn = by_objectives(replace(TABLE, rows=[*TABLE.rows[:1], *near]), "accuracy@mqar", "flops_per_token")
    assert drawn is not None
    spec = drawn[0].to_dict()
    named = [
        (layer["mark"]["dx"], layer["mark"]["dy"], len(spec["datasets"][layer["data"]["name"]]))
        for layer in spec["layer"]
        if layer["mark"]["type"] == "text"
    ]
    assert sum(count for *_, count in named) == 6
    assert max(count for *_, count in named) <= 2, "the base and one of the five"


def row(name: str, kind: str, accuracy: float, flops: float, **settings: Any) -> dict[Any, Any]:
    scores = {"accuracy@mqar": accuracy, "flops_per_token": flops}
    own = {path.replace("_", ".", 1): value for path, value in settings.items()}
    about = {
        "name": name,
        "what": f"what {name} is",
        "kind": kind,
        "by": "tpe",
        "learned": name != "6",
        "settings": str(own),
    }
    absent = dict.fromkeys(SPACE)
    return {**about, **scores, **{("first", key): score for key, score in scores.items()}, **absent, **own}


SPACE = {
    "rule.decay": Search(choice=("none", "scalar")),
    "rule.start": Search(choice=("slow", "fast"), when={"rule.decay": ["scalar"]}),
    "train.lr": Search(log_uniform=(0.001, 1)),
}
TABLE = CandidateTable(
    [
        row("base", "base", 0.5, 100, rule_decay="none", train_lr=0.001),
        row("found_1", "finalist", 0.9, 200, rule_decay="scalar", rule_start="fast", train_lr=1.0),
        row("3", "on the front", 0.6, 100, rule_decay="none", train_lr=0.0011),
        row("4", "dominated", 0.4, 150, rule_decay="scalar", rule_start="slow", train_lr=0.9),
        row("5", "dominated", math.nan, 150, rule_decay="scalar", rule_start="slow", train_lr=0.5),
    ],
    SPACE,
    {"accuracy@mqar": True, "flops_per_token": False},
    {"accuracy@mqar": "accuracy", "flops_per_token": "flops_per_token"},
)


def datasets(drawn: Any) -> list[list[dict[str, Any]]]:
    spec = drawn.to_dict()
    parts = spec.get("layer", [spec])
    return [spec["datasets"][part.get("data", spec.get("data"))["name"]] for part in parts]


def test_the_front_is_a_line_of_steps_up_to_the_worst_values() -> None:
    drawn = by_objectives(TABLE, "accuracy@mqar", "flops_per_token")
    assert drawn is not None
    stairs, points, *names = datasets(drawn[0])
    assert [(step["across"], step["down"]) for step in stairs] == [(100, 0.4), (100, 0.6), (200, 0.9), (200, 0.9)]
    assert drawn[0].to_dict()["layer"][0]["mark"]["interpolate"] == "step-after"
    assert {point["candidate"] for point in points} == {"base", "found_1", "3", "4"}, "not the one without a score"
    assert {name["candidate"] for of_place in names for name in of_place} == {"base", "found_1"}
    assert points[-1]["candidate"] == "base", "drawn last, on top"
    turned = by_objectives(TABLE, "flops_per_token", "accuracy@mqar")
    assert turned is not None
    assert [(step["across"], step["down"]) for step in datasets(turned[0])[0]] == [
        (0.4, 100),
        (0.6, 100),
        (0.9, 200),
        (0.9, 200),
    ]
    assert turned[0].to_dict()["layer"][0]["mark"]["interpolate"] == "step-before"


def test_no_line_joins_what_is_no_better_than_chance() -> None:
    idle = row("6", "no better than chance", 0.4, 90, rule_decay="none", train_lr=0.5)
    drawn = by_objectives(replace(TABLE, rows=[*TABLE.rows, idle]), "accuracy@mqar", "flops_per_token")
    assert drawn is not None
    stairs, points, *_ = datasets(drawn[0])
    assert min(step["across"] for step in stairs) == 100
    assert "6" in {point["candidate"] for point in points}


def test_candidates_of_one_kind_are_drawn() -> None:
    """A size by kind would be a scale from the least to the most kind, which is no number where there is one kind."""
    alike = replace(TABLE, rows=[row for row in TABLE.rows if row["kind"] == "base"])
    drawn = by_objectives(alike, "accuracy@mqar", "flops_per_token")
    assert drawn is not None
    assert [point["size"] for point in datasets(drawn[0])[1]] == [150]
    assert drawn[0].to_dict()["layer"][1]["encoding"]["size"] == {
        "field": "size",
        "type": "quantitative",
        "scale": None,
    }


def test_parallel_coordinates_show_a_knob_that_does_not_exist_beside_the_axes() -> None:
    drawn, frame, left_out = by_all_settings(TABLE, {"found_1"}, "accuracy@mqar")
    at = {(each["candidate"], each["setting"]): each for each in frame.to_dict("records")}
    assert at["found_1", "rule.start"]["value"] == "fast"
    assert at["base", "rule.start"]["value"] == "does not exist"
    assert at["base", "rule.start"]["at"] < 0 <= at["base", "rule.decay"]["at"]
    assert at["base", "train.lr"]["at"] == 0
    assert at["found_1", "train.lr"]["at"] == 1
    assert (at["found_1", "accuracy"]["at"], at["found_1", "flops_per_token"]["at"]) == (1, 0), "right is better"
    assert {each["kind"] for each in frame.to_dict("records")} == {"finalist", "other"}
    assert left_out == 0
    assert "absent" in {tick["value"] for tick in datasets(drawn)[-1]}


def test_of_many_candidates_the_worst_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab_dashboard.charts.candidate_settings.MOST_LINES", 2)
    _, frame, left_out = by_all_settings(TABLE, {"base"}, "accuracy@mqar")
    assert (set(frame["candidate"]), left_out) == ({"base", "found_1"}, 2)


def test_one_setting_has_the_candidates_that_have_it_and_means_by_part_of_its_range() -> None:
    start = by_setting(TABLE, "rule.start", "accuracy@mqar")
    assert start is not None
    assert set(start[1]["candidate"]) == {"found_1", "4"}
    rate = by_setting(TABLE, "train.lr", "accuracy@mqar")
    assert rate is not None
    means = sorted((each["from"], round(each["mean"], 3), each["candidates"]) for each in datasets(rate[0])[1])
    assert [means[0], means[-1][1:]] == [(0.001, 0.55, 2), (0.65, 2)]
    assert by_setting(replace(TABLE, rows=TABLE.rows[:1]), "rule.start", "accuracy@mqar") is None


def test_two_settings_leave_cells_without_candidates_empty() -> None:
    drawn = by_two_settings(TABLE, "train.lr", "rule.decay", "accuracy@mqar")
    assert drawn is not None
    search_results = {
        (each["across"], each["down"]): (each["mean"], each["candidates"]) for each in datasets(drawn[0])[0]
    }
    assert len(search_results) == 2, "of 16 cells"
    assert search_results[0.001, "none"] == (pytest.approx(0.55), 2)
    conditional = by_two_settings(TABLE, "rule.decay", "rule.start", "accuracy@mqar")
    assert conditional is not None
    assert conditional[0].to_dict()["encoding"]["x"]["scale"]["domain"] == ["none", "scalar"], "with its empty column"


@pytest.fixture
def tuned(store: Store) -> int:
    """late is best at the highest rate, base between two others; base diverged at one with every seed."""
    study = begin(store, "tuned", changes={"base": {}, "late": {"x": [1, 2]}})
    for number, lr in enumerate((0.001, 0.01, 0.1, 0.05)):
        own = [[0.5, 0.7, 0.6, math.nan][number]] * 8
        record(store, study, "base", "mqar", own, number=number, tuned={"train.lr": lr})
        record(store, study, "late", "mqar", [0.5 + 4 * lr] * 8, number=number, tuned={"train.lr": lr})
    store.finish_study(study, "done")
    return study


def test_a_line_for_each_arm_against_the_value_with_its_best_marked(tuned: int) -> None:
    app = open_page("sensitivity.py")
    assert "The best train.lr of late is the highest that was tried, 0.1: the arm may do better" in app.warning[
        0
    ].value.replace("\\", "")
    assert "No seed finished with train.lr 0.05: base." in texts(app)
    [chart] = charts(app)
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["line", "rule", "point", "point"]
    assert chart["layer"][0]["encoding"]["x"]["scale"]["type"] == "log"
    assert chart["layer"][0]["encoding"]["y"]["title"] == "accuracy on validation (higher is better)"
    table = cells(app.table[0].value)
    assert table["best values"] == ["train.lr 0.01", "train.lr 0.1"]
    assert table["at an end"] == ["", "train.lr: highest tried"]


def test_the_url_restores_the_view_of_sensitivity(tuned: int) -> None:
    app = open_page("sensitivity.py", split="test", arms="late")
    [chart] = charts(app)
    assert chart["layer"][0]["encoding"]["y"]["title"] == "accuracy on test (higher is better)"
    assert chart["layer"][0]["encoding"]["color"]["scale"]["domain"] == ["late"]
    assert app.query_params["split"] == "test"


def test_a_study_that_tunes_nothing_says_so(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ledgers.SPEC", {"seeds": 8})
    record(store, begin(store, "plain"), "base", "mqar", BASE)
    assert "This study tunes nothing" in texts(open_page("sensitivity.py"))


def test_tuning_that_has_just_begun(store: Store) -> None:
    begin(store, "new")
    assert "No candidate has a score yet." in texts(open_page("sensitivity.py"))


def test_the_base_of_a_search_has_its_tuning(searched: int) -> None:
    app = open_page("sensitivity.py")
    assert "The page Search shows the search's candidates." in texts(app)
    assert cells(app.table[0].value)["arm"] == ["base", "found_1", "found_2"]


def test_only_its_view_asks_what_each_setting_explains(searched: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grown: list[int] = []
    trees = importance._trees

    def counted(candidates: Any, scores: Any, space: Any) -> Any:
        grown.append(len(scores))
        return trees(candidates, scores, space)

    monkeypatch.setattr(importance, "_trees", counted)
    for page in ("answer.py", "curves.py", "trials.py", "arms.py", "sensitivity.py"):
        open_page(page)
    assert not grown, "a forest takes seconds"
    open_page("search.py")
    assert not grown
    open_page("search.py", view="What mattered")
    assert grown
