"""The study's page: its sentence, tables, charts and files; the colours of all pages."""

from itertools import combinations
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest
import streamlit as st
from numpy.typing import NDArray
from tests.support.ledgers import BASE, BOUNDED, begin, charts, open_page, record, texts

from deltalab.store import Store
from deltalab.study.reports.report import report
from deltalab.study.reports.sentence import sentence
from deltalab_dashboard import app, colors
from deltalab_dashboard.charts import task_table
from deltalab_dashboard.downloads import to_csv, to_latex, to_png, to_svg, zoom

Array = NDArray[np.float64]
# What a deuteranope sees of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1).
DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])  # D65


def linear(color: str) -> Array:
    """A colour #rrggbb as linear RGB."""
    c = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: Array) -> Array:
    """Linear RGB as CIELAB."""
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(a: str, b: str) -> float:
    """Delta E (CIE76) of two colours under simulated deuteranopia."""
    return float(np.linalg.norm(lab(DEUTERANOPIA @ linear(a)) - lab(DEUTERANOPIA @ linear(b))))


def contrast(a: str, b: str) -> float:
    """The contrast of two colours as WCAG 2 has it."""
    dark, light = sorted(float(TO_XYZ[1] @ linear(color)) + 0.05 for color in (a, b))
    return light / dark


def test_a_deuteranope_can_tell_the_colors_of_verdicts_apart() -> None:
    assert apart("#1a9850", "#d73027") < 40, "green and red, which they cannot"
    for a, b in combinations(set(colors.COLORS.values()), 2):
        assert apart(a, b) >= 40, (a, b)


def test_colors_of_verdicts_can_be_seen_on_a_light_and_a_dark_page() -> None:
    for color in (*colors.COLORS.values(), colors.BASE):
        assert contrast(color, "#ffffff") >= 4.5
        assert contrast(color, "#171614") >= 3
    for color in (*colors.PALETTE, colors.ACCENT, colors.OTHERS):
        assert min(contrast(color, "#ffffff"), contrast(color, "#171614")) >= 3, color


def test_names_in_the_colors_of_arms_can_be_read_on_a_light_and_a_dark_page() -> None:
    assert contrast("#007733", "#171614") < 4.5, "green, which cannot"
    for color in (*colors.PALETTE, colors.BASE, colors.OTHERS):
        for theme, page in colors.PAGES.items():
            assert contrast(colors.text_color(color, theme), page) >= 4.5, (color, theme)


def test_a_deuteranope_can_tell_the_colors_of_arms_apart() -> None:
    for a, b in combinations((*colors.PALETTE, colors.BASE), 2):
        assert apart(a, b) >= 12, (a, b)


def test_verdicts_differ_in_shape_too() -> None:
    for looks, different in ((colors.COLORS, 3), (colors.SHAPES, 4), (colors.MARKS, 4)):
        assert list(looks) == ["better", "worse", "equal", "undecided"]
        assert len(set(looks.values())) == different


def test_ten_arms_have_a_color_each_and_more_are_grey_but_for_the_highlighted() -> None:
    ten = [f"arm_{i}" for i in range(10)]
    color_of = colors.arm_colors(["base", *ten], "base")
    assert len(set(color_of.values())) == 11
    assert not {colors.OTHERS} & set(color_of.values())
    many = [f"arm_{i}" for i in range(40)]
    color_of = colors.arm_colors(["base", *many], "base", ["arm_3", "arm_13"])
    assert {name for name, color in color_of.items() if color != colors.OTHERS} == {"base", "arm_3", "arm_13"}
    assert len({color_of["base"], color_of["arm_3"], color_of["arm_13"]}) == 3
    assert colors.arm_colors(many, None, ["arm_3"])["arm_3"] == color_of["arm_3"], (
        "whatever else is highlighted after it"
    )


ROWS = range(6000)  # Altair refuses more than 5,000 unless told otherwise
POINTS = alt.Chart(pd.DataFrame({"step": ROWS, "loss": ROWS})).mark_point().encode(x="step:Q", y="loss:Q")


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [POINTS, alt.layer(POINTS, POINTS), POINTS | POINTS])
def test_a_chart_of_any_size_makes_files(drawn: Any) -> None:
    assert to_png(drawn).startswith(b"\x89PNG")
    assert to_svg(drawn).startswith("<svg")


def test_the_wheel_alone_scrolls_the_page() -> None:
    few = alt.Chart(pd.DataFrame({"x": [1]})).mark_point()
    [parameter] = few.add_params(zoom()).to_dict()["params"]
    assert parameter["bind"] == "scales"
    assert parameter["select"]["zoom"] == "wheel![event.shiftKey]"


def test_a_table_makes_files() -> None:
    rows = [{"arm": "no_d", "p": "0.02"}, {"arm": 'a "b", c', "p": ""}]
    assert to_csv(rows) == 'arm,p\nno_d,0.02\n"a ""b"", c",\n'
    assert r"no\_d & 0.02 \\" in to_latex(rows, "what p is")
    assert to_latex(rows, "what p is").startswith("% what p is\n\\begin{tabular}{lr}\n")
    assert to_latex(rows).startswith("\\begin{tabular}")


def answer_of(store: Store, study: int) -> str:
    return sentence(report(store, study))


def scores(shift: float, noise: float = 0.0) -> list[float]:
    return [value + shift + noise * (-1) ** i for i, value in enumerate(BASE)]


@pytest.mark.parametrize(
    ("arms", "state", "expected"),
    [
        ({"a": scores(0.05)}, "done", "a beats the base on mqar by 0.05 accuracy (p 0.008, 8 seeds)."),
        ({"a": scores(-0.05)}, "done", "a is worse than the base on mqar by 0.05 accuracy (p 0.008, 8 seeds)."),
        (
            {"a": scores(-0.05), "b": scores(0.04)},
            "failed",
            "Some trials failed; of the others: b beats the base on mqar by 0.04 accuracy (p 0.008, 8 seeds); "
            "a is worse.",
        ),
        (
            {"a": scores(0.001, 0.02)},
            "done",
            "Nothing is decided: 8 seeds tell no difference between a and the base; over 1,000 seeds would decide a "
            "on mqar (+0.001 accuracy, p 0.734).",
        ),
        ({}, "done", "Nothing to compare: the study has only its base, with 0.921 accuracy on mqar."),
        ({}, "interrupted", "Nothing to compare: the study has only its base, with 0.921 accuracy on mqar."),
    ],
)
def test_one_sentence_states_the_answer(store: Store, arms: dict[str, list[float]], state: Any, expected: str) -> None:
    study = begin(store, "answered", changes={"base": {}, **{arm: {"x": [1, 2]} for arm in arms}})
    record(store, study, "base", "mqar", BASE)
    for arm, values in arms.items():
        record(store, study, arm, "mqar", values)
    store.finish_study(study, state)
    assert answer_of(store, study) == expected


def test_a_study_without_a_confirmed_trial_says_so(store: Store) -> None:
    study = begin(store, "new")
    assert answer_of(store, study) == "No answer yet: confirmation has not begun."
    record(store, study, "base", "mqar", BASE, "tune")
    assert "on validation base leads on mqar" in sentence(report(store, study, which="tune"))
    store.finish_study(study, "interrupted")
    assert answer_of(store, study).startswith("Interrupted before any arm could be compared")


def test_the_page_says_the_sentence_and_draws_each_seed(store: Store, ablation: int) -> None:
    app = open_page(tables="true")
    assert answer_of(store, ablation) in texts(app)
    assert "▲ 1 better" in texts(app)
    dots = charts(app)[0]["layer"][3]
    assert dots["mark"]["type"] == "circle"
    assert sorted(report(store, ablation).tables[0].rows[1].by_seed) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_arms_and_columns_are_chosen_and_figures_stay(ablation: int) -> None:
    [all_arms, *_] = (each.value for each in open_page(tables="true").dataframe)
    app = open_page(tables="true", arms="no_*d*", columns=["p", "verdict"])
    [table, *_] = (each.value for each in app.dataframe)
    assert list(table) == ["arm", "best", "verdict", "p"]
    assert list(table["arm"]) == ["base", "no_*d*"]
    assert table["p"][1] == all_arms["p"][1], "the arms are tested together, whatever is shown"
    assert "late" not in app.get("html")[-1].proto.body
    assert "p and intervals are those of the test of all arms together" in texts(app)


def test_the_url_keeps_costs_and_the_order_of_the_arms(ablation: int) -> None:
    app = open_page(tables="true", costs="true", order="by score")
    table, costs = (each.value for each in app.dataframe[2:4])
    assert "us/token" in costs
    assert "us/token" not in table, "beside the answer, the costs would be beyond the edge of the screen"
    assert list(table["arm"]) == list(costs["arm"]) == ["no_*d*", "base", "late"], (
        "bits per byte: lower is better; late did not run"
    )
    assert "us/token" not in open_page(tables="true").dataframe[1].value
    assert len(open_page().dataframe) == 0, "exact tables are drawn if they are asked for"


def test_a_long_table_has_no_empty_row(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    study = begin(store, "many", changes={f"arm_{at}": {"x": [0, at]} if at else {} for at in range(13)})
    for at in range(13):
        record(store, study, f"arm_{at}", "mqar", BASE)
    heights: list[Any] = []
    monkeypatch.setattr(task_table.downloads, "sortable", lambda *_, **options: heights.append(options["height"]))
    task_table.draw_task(report(store, study).tables[0], "many", task_table.ORDERS[0], costs=False)
    assert heights == ["content"]


def test_tracebacks_are_one_click_away(store: Store) -> None:
    study = begin(store, "broken", changes={"base": {}, "lost": {"x": [0, 1]}})
    record(store, study, "base", "mqar", BASE)
    record(store, study, "lost", "mqar", BASE, state="failed", error="RuntimeError: boom")
    [link] = open_page().get("page_link")
    assert link.proto.query_string == "study=1+broken&states=failed"
    [listed] = open_page("trials.py", states="failed").dataframe
    assert list(listed.value["state"]) == ["failed"]


def test_the_menu_has_the_pages_with_something_to_show(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = begin(store, "plain", changes={"base": {}}, tune={})
    tuned = begin(store, "tuned", changes={"base": {}})
    monkeypatch.setattr(app, "ledger", lambda: store)
    monkeypatch.setattr(st, "session_state", {"study": plain})
    assert app.empty_views() == {"search", "sensitivity", "ladder", "trainings", "trial"}
    monkeypatch.setattr(st, "session_state", {"study": tuned})
    assert "sensitivity" not in app.empty_views()


def test_a_study_of_several_tasks_shows_the_mean_over_them_first(store: Store) -> None:
    study = begin(store, "both", changes={"base": {}, "up": {"x": [1, 2]}}, tasks=BOUNDED)
    for task, gain in (("mqar", 0.02), ("text", -0.2)):
        record(store, study, "base", task, BASE)
        record(store, study, "up", task, [value + gain for value in BASE])
    app = open_page(tables="true")
    assert "So far, while the study runs: over 2 tasks up beats the base by " in texts(app)
    over, mqar, _ = (table.value for table in app.dataframe)
    assert list(over["arm"]) == ["base", "up"]
    assert over["IQM"][1] == report(store, study).headline.rows[1].iqm  # type: ignore[union-attr]
    assert "IQM" not in mqar
    assert charts(app)[0]["layer"][3]["mark"]["type"] == "circle", "each seed's difference"
    assert "us/token" not in open_page(tables="true", costs="true").dataframe[0].value


def test_means_over_the_same_tasks_stand_side_by_side(store: Store) -> None:
    arms = {"base": {}, "up": {"x": [1, 2]}}
    one, other = (begin(store, name, changes=arms, tasks=BOUNDED) for name in ("one", "other"))
    less = begin(store, "less", changes=arms, tasks={"mqar": BOUNDED["mqar"], "parity": BOUNDED["mqar"]})
    for study in (one, other):
        for arm in arms:
            for task in BOUNDED:
                record(store, study, arm, task, BASE)
    record(store, less, "base", "mqar", BASE)
    assert "over tasks" in texts(open_page("compare.py", study="1 one", right="2 other"))
    assert "over tasks" not in texts(open_page("compare.py", study="1 one", right="3 less"))
