"""What a report gives to a notebook: a DataFrame and HTML."""

import code
import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from tests.support.ledgers import BASE, begin, record

import deltalab
from deltalab.errors import InputError
from deltalab.store import Store
from deltalab.study.reports.html.forest import VERDICTS
from deltalab.study.reports.report import report
from deltalab_dashboard import colors


def test_a_session_of_a_notebook(ablation: int, tmp_path: Path) -> None:
    """The lines that the reference shows, executed one after the other as cells."""
    cells = [
        "import deltalab",
        f"found = deltalab.report('ablation', db={str(tmp_path / 'lab.db')!r})",
        "html = found._repr_html_()",
        "figures = found.to_frame()",
        "decided = figures[figures.verdict.isin(['better', 'worse'])].set_index('task')",
        "print(decided.difference_mean.round(2).to_dict())",
    ]
    session, out = code.InteractiveInterpreter(), io.StringIO()
    with redirect_stdout(out):
        for cell in cells:
            assert session.runsource(cell) is False, cell
    assert out.getvalue() == "{'mqar': -0.4, 'text': -0.4}\n"
    assert "ablation, default profile" in session.locals["html"]  # type: ignore[operator]


def test_a_frame_has_the_lines_of_the_csv_with_types(store: Store, ablation: int) -> None:
    found = report(store, ablation)
    frame, from_csv = found.to_frame(), pd.read_csv(io.StringIO(found.to_csv()))
    assert list(frame.columns) == list(from_csv.columns)
    assert list(zip(frame.task, frame.arm, strict=True)) == list(zip(from_csv.task, from_csv.arm, strict=True))
    types = {"score_n": "Int64", "state_size": "Int64", "score_mean": "float64", "difference_p": "float64",
             "maximize": "bool"}  # fmt: skip
    assert {column: str(frame[column].dtype) for column in types} == types
    pd.testing.assert_series_equal(frame.score_mean, from_csv.score_mean)
    base = frame.iloc[0]
    assert base.tuned == {"train.lr": 0.01} == json.loads(from_csv.tuned[0])
    assert math.isnan(base.difference_mean)
    assert base.state_size is pd.NA


def test_a_report_without_a_part_has_an_empty_frame(store: Store, ablation: int) -> None:
    found = report(store, ablation)
    assert found.to_frame("ladders").empty
    assert found.to_frame("trainings").empty
    with pytest.raises(InputError, match="unknown part of a report 'arm'; did you mean 'arms'"):
        found.to_frame("arm")  # type: ignore[arg-type]


def test_html_says_verdicts_by_mark_and_colour(store: Store, ablation: int) -> None:
    html = report(store, ablation)._repr_html_()
    assert f'<b style="color: {colors.WORSE}">▼ worse</b>' in html
    assert f'<b style="color: {colors.BETTER}">▲ better</b>' in html
    assert {verdict: (colors.MARKS[verdict], colors.COLORS[verdict]) for verdict in VERDICTS} == VERDICTS
    assert "failed: late, tune 0 on mqar: RuntimeError: out of memory" in html


def test_html_escapes_what_the_ledger_holds(store: Store) -> None:
    changes: dict[str, Any] = {"base": {}, "<script>alert(1)</script>": {"x": [1, 2]}}
    study = begin(store, "a<b", changes=changes)
    for arm in changes:
        record(store, study, arm, "mqar", BASE)
    html = report(store, study)._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "a&lt;b, default profile" in html


def test_html_is_short(store: Store) -> None:
    """A notebook shows a few tables, and names the other tasks and how many trials failed."""
    study = begin(store, "many", changes={"base": {}})
    for number in range(9):
        record(store, study, "base", "mqar", [], "tune", number, state="failed", error="RuntimeError: x")
    html = report(store, study)._repr_html_()
    assert html.count("✗ failed") == 3
    assert "6 more trials failed" in html


def test_a_report_of_a_study_that_is_not_there(store: Store, ablation: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown study 'ablatoin'; did you mean 'ablation'"):
        deltalab.report("ablatoin", db=tmp_path / "lab.db")
