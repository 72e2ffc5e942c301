"""The list of studies, two studies side by side, and what an address asks for that a page does not have."""

import pytest
from tests.support.ledgers import BASE, BOUNDED, begin, cells, charts, open_page, record, texts

from deltalab.store import Store
from deltalab.store.studies import shelf
from deltalab.study.reports.report import report
from deltalab.study.reports.study_diff import side_of_study
from deltalab_dashboard.views import compare


def test_the_list_finds_studies_and_leaves_out_hidden_ones(store: Store, ablation: int) -> None:
    shelf.tag(store, ablation, ["paper"])
    other = begin(store, "other", "gpu")
    shelf.hide(store, other)
    app = open_page("studies.py")
    assert list(app.dataframe[0].value["study"]) == ["ablation"]
    assert "1 of 2 studies, 1 hidden" in texts(app)
    assert list(open_page("studies.py", which="listed and hidden").dataframe[0].value["study"]) == ["other", "ablation"]
    assert len(open_page("studies.py", find="late paper").dataframe[0].value) == 1
    assert "No study is like this" in texts(open_page("studies.py", find="nonesuch"))
    assert list(open_page().selectbox(key="study").options) == ["1 ablation"]


def test_a_selected_study_is_tagged_hidden_deleted_and_restored(store: Store, ablation: int) -> None:
    app = open_page("studies.py")
    rows = f"rows {ablation}"
    app.session_state[rows] = {"selection": {"rows": [0], "columns": [], "cells": []}}
    app.run()
    assert "3 arms, 8 trials and 42 runs" in texts(app)
    [button] = [button for button in app.button if button.label == "Delete this study"]
    button.click().run()
    assert not app.exception
    assert shelf.listed(store) == []
    assert len(shelf.listed(store, deleted=True)) == 1
    assert list(open_page("studies.py", which="deleted").dataframe[0].value["study"]) == ["ablation"]


def test_two_studies_stand_side_by_side(store: Store, ablation: int) -> None:
    begin(store, "ablation", "gpu")
    said = texts(open_page("compare.py", study="1 ablation"))
    for text in ("What they compute", "All settings of what both have are the same", "Verdicts", "Curves"):
        assert text in said
    assert not open_page("compare.py", study="1 ablation", what="arms", right="1 ablation").exception


def test_three_studies_have_their_verdicts_and_curves_together(store: Store) -> None:
    for name, low in (("one", 0.0), ("two", 0.1), ("three", 0.2)):
        study = begin(store, name, changes={"base": {}, "other": {"x": [0, 1]}})
        record(store, study, "base", "mqar", [value - low for value in BASE])
        record(store, study, "other", "mqar", [value - low - 0.1 for value in BASE])
        store.finish_study(study, "done")
    query = {"study": "1 one", "left": "1 one", "right": "2 two", "further": "3 three", "task": "mqar"}
    app = open_page("compare.py", **query)
    table = cells(next(table.value for table in app.table if "arm" in table.value))
    assert list(zip(table["arm"], table["id"], strict=True)) == [(arm, i) for arm in ("base", "other") for i in "123"]
    assert table["accuracy"][2].startswith("0.721")
    assert table["verdict"][:3] == ["base"] * 3
    [chart] = charts(app)
    [lines] = chart["layer"]  # Bands are drawn on demand.
    domain = lines["encoding"]["strokeDash"]["scale"]
    assert len(domain["domain"]) == len({str(dash) for dash in domain["range"]}) == 3
    [chart] = charts(open_page("compare.py", **query, bands="true"))
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["area", "line"]


def test_two_arms_of_a_study_have_overlaid_curves(store: Store, ablation: int) -> None:
    app = open_page("compare.py", study="1 ablation", what="arms", left_arm="base", right_arm="no_*d*")
    assert len(app.get("vega_lite_chart")) == 1
    assert "base of ablation (id 1)" in str(list(app.table[0].value.columns)).replace("\\", "")


def test_bands_stay_within_what_the_metric_can_be(store: Store) -> None:
    study = begin(store, "bounded", changes={"base": {}}, tasks=BOUNDED)
    record(store, study, "base", "mqar", [1.0, 1.0, 0.9])
    row = store.study(study)
    whole = compare.Choice(row, side_of_study(row, store.arms(study)), report(store, study), None)
    [*_, last] = compare.mean_curves(store, whole, ["base"], "mqar", "accuracy", "test")
    assert last["high"] == 1.0
    assert last["low"] < 0.9


def test_two_arms_of_a_study_are_tested_against_each_other(store: Store, ablation: int) -> None:
    app = open_page("compare.py", study="1 ablation", what="arms", left_arm="no_*d*", right_arm="base")
    figures = dict(zip(*list(cells(app.table[0].value).values())[::2], strict=True))
    assert figures["difference"].startswith("+0.400 [")
    assert figures["verdict"] == "▲ better"
    said = texts(app)
    assert "Differences, p and verdicts are against no_*d*. Compared with no_*d*, while the study was planned" in said
    plain = open_page("compare.py", study="1 ablation", what="arms", left_arm="base", right_arm="no_*d*")
    assert "Differences, p and verdicts are against base." in texts(plain)
    assert "while the study was planned" not in texts(plain)


@pytest.mark.slow(keep="tsak")
@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"tsak": "mqar"}, "This page has nothing called 'tsak' to show. Did you mean 'task'?"),
        ({"task": "mqra"}, "There is no task 'mqra' here; shown is mqar."),
        ({"arms": ["late", "lat"]}, "There is no arm 'lat' here; shown is late."),
    ],
)
def test_what_a_page_does_not_have_is_said(store: Store, ablation: int, query: dict[str, str], told: str) -> None:
    assert told in texts(open_page("curves.py", **query))


def test_an_address_that_a_page_can_show_says_nothing(store: Store, ablation: int) -> None:
    app = open_page(
        "curves.py", study="1 ablation", task="text", metric="bits_per_byte", split="validation", arms="late"
    )
    assert "here; shown is" not in texts(app)
    assert "nothing called" not in texts(app)


def test_a_study_of_one_size_has_no_ladder(store: Store, ablation: int) -> None:
    assert "This study runs at one size" in texts(open_page("ladder.py"))
