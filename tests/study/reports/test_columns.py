"""A statistic that becomes a column is everywhere where a report shows its figures."""

import csv
import io
import json

import pytest
from rich.console import Console
from tests.support.ledgers import open_page

from deltalab.store import Store
from deltalab.study.reports import columns
from deltalab.study.reports.columns import Column
from deltalab.study.reports.report import report
from deltalab_dashboard.charts.task_table import text_table, typed_table
from deltalab_dashboard.downloads import to_latex

LETTERS = Column(
    "letters",
    "letters of {metric}",
    lambda row: len(row.arm),
    lambda row: f"{len(row.arm)} letters",
    "answer",
    int,
    "How long the name of an arm is.",
    "%d",
)


@pytest.fixture
def at_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new column stands at this place among the others: no reader of the list may count on places."""
    others = columns.COLUMNS
    monkeypatch.setattr(columns, "COLUMNS", (*others[: request.param], LETTERS, *others[request.param :]))


@pytest.mark.parametrize("at_place", [0, 1, 3, len(columns.COLUMNS)], indirect=True)
def test_a_column_is_found_in_every_form_of_a_report(store: Store, ablation: int, at_place: None) -> None:
    found = report(store, ablation)
    [table, _] = found.tables
    out = Console(width=200, file=io.StringIO())
    out.print(found)
    forms = {
        "terminal": out.file.getvalue(),  # type: ignore[attr-defined]
        "Markdown": found.to_markdown(),
        "HTML": found._repr_html_(),
        "LaTeX": to_latex(text_table(table, columns.columns(table, "name", "answer"))),
    }
    for name, text in forms.items():
        assert "letters of accuracy" in text, name
        assert "6 letters" in text, f"{name}: no_*d*"
    assert [row["letters"] for row in json.loads(found.to_json())["tables"][0]["rows"]] == [4, 6, 4]
    lines = csv.DictReader(io.StringIO(found.to_csv()))
    assert [line["letters"] for line in lines] == 2 * ["4", "6", "4"]
    frame = found.to_frame()
    assert (str(frame["letters"].dtype), list(frame["letters"])) == ("Int64", 2 * [4, 6, 4])
    assert list(open_page(tables="true").dataframe[0].value["letters of accuracy"]) == [4, 6, 4]
    assert (
        typed_table(table, columns.columns(table, "name", "answer"))[1]["letters of accuracy"]["help"] == LETTERS.help
    )


def test_each_key_and_heading_is_one_column() -> None:
    keys = [column.key for column in columns.COLUMNS if column.key]
    heads = [column.head for column in columns.COLUMNS if column.head]
    assert len(set(keys)) == len(keys)
    assert len(set(heads)) == len(heads)
    assert not [column for column in columns.COLUMNS if column.group != "files" and not column.head]
