"""The forest of all arms and tasks, and the page of HTML that has it."""

import re
from html.parser import HTMLParser

import pytest
from tests.support.ledgers import BASE, begin, record

from deltalab.store import Store
from deltalab.study.reports.html.forest import FARTHEST, Axis, forest
from deltalab.study.reports.report import Report, report

NAMES = ["base", "<b>worse</b>", "better", "far", "late"]
CHANGES = {name: {} if name == "base" else {"x": [0, at]} for at, name in enumerate(NAMES)}


@pytest.fixture
def answer(store: Store) -> Report:
    """Arms on one task: one better, one slightly worse, one far below all others, and one that lost a seed."""
    task = {"version": 1, "metric": "accuracy", "maximize": True, "chance": 0.0, "bounds": [0, 1], "margin": 0.01}
    study = begin(store, "forest", changes=CHANGES, tasks={"mqar": task})
    for arm, gain in zip(NAMES, (0.0, -0.02, 0.03, -0.9, 0.0), strict=True):
        scores = [value + gain * (1 + 0.01 * at) for at, value in enumerate(BASE)]
        record(store, study, arm, "mqar", scores, state_size=20 if arm == "better" else 10)
    return report(store, study)


class Rows(HTMLParser):
    """The words and the classes of each row of a forest's body."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.opened: list[str] = []
        self.feed(html.partition("<tbody>")[2])

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.opened.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.rows[-1] += [f".{value}" for name, value in attributes if name == "class"]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.rows[-1].append(data.strip())


def test_arms_stand_by_their_effect_with_mark_interval_p_and_seeds(answer: Report) -> None:
    found = Rows(forest(answer))
    assert [row[0] for row in found.rows] == ["base", "better", "late", "<b>worse</b>", "far"]
    assert "b" not in found.opened, "names are text"
    base, better, *_ = found.rows
    [difference] = [row.difference for row in answer.tables[0].rows if row.arm == "better" and row.difference]
    told = ("▲ better by over 0.01,", f"+0.031 [{difference.low:+.3f}, {difference.high:+.3f}]", "p 0.008")
    assert [text for text in better if text in told] == [*told]
    assert [better.count(f".{name}") for name in ("margin", "zero", "interval", "mean", "seed")] == [1, 1, 1, 1, 8]
    assert base.count(".seed") == 0
    assert base[-1] == "lr 0.01", "the base has no cost beside itself"
    assert better[-1] == "2× state; lr 0.01"


def test_an_arm_far_beyond_the_others_is_cut_off(answer: Report) -> None:
    [table] = answer.tables
    axis = Axis.of(table)
    assert axis.low > -0.9
    assert axis.place(-0.9) == 0.0
    assert axis.place(axis.high) == 100.0
    reaches = sorted(abs(axis.low - end) for end in (0.0, axis.low))
    assert reaches[-1] < 2 * FARTHEST * 0.035


def test_seeds_that_did_not_finish_are_told(store: Store) -> None:
    study = begin(store, "lost", changes={"base": {}, "late": {"x": [0, 1]}})
    record(store, study, "base", "mqar", BASE)
    record(store, study, "late", "mqar", [*BASE[:7], float("nan")])
    assert "1 of 8 seeds did not finish" in forest(report(store, study))


def test_a_difference_over_some_of_the_seeds_says_over_which(store: Store) -> None:
    study = begin(store, "apart", changes={"base": {}, "few": {"x": [0, 1]}})
    record(store, study, "base", "mqar", [*BASE, *(score + 0.05 for score in BASE)])
    record(store, study, "few", "mqar", BASE)
    assert "over the 8 seeds of both" in forest(report(store, study)), "the means are over 16 and 8 seeds"


def test_there_is_no_forest_where_nothing_is_compared(store: Store) -> None:
    study = begin(store, "alone", changes={"base": {}})
    record(store, study, "base", "mqar", BASE)
    assert forest(report(store, study)) == ""
    assert "<h2>" in report(store, study).to_html()


def test_the_page_has_every_figure_of_the_markdown_and_loads_nothing(answer: Report) -> None:
    page = answer.to_html()
    for line in answer.to_markdown().splitlines():
        for cell in line.strip("|-# *").split(" | "):
            assert cell.strip(" *-|").replace("<", "&lt;").replace(">", "&gt;") in page.replace("&#x27;", "'")
    assert not re.search(r"(?:src|href|url\(|@import)", page)
    assert "<b>worse" not in page
