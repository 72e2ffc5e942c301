"""A study's report in a notebook: how to get it by the study's name, and its form as HTML."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from deltalab.store import Store
from deltalab.study.answers.answer import Row, TaskTable
from deltalab.study.reports.report import Report, caption, cells, failure_lines, headers
from deltalab.study.reports.report import report as of_store
from deltalab.study.reports.sentence import sentence, short

VERDICTS = {"better": ("▲", "#1f6fd6"), "worse": ("▼", "#c25700")}
"""The mark and the colour of a decided verdict, as in the dashboard. Colour-blind readers tell blue from orange."""
MOST_TABLES = 4
MOST_FAILURES = 3
ANSWER = range(6)
"""The cells of a row that answer, before those of its costs."""


def report(study: str | int, *, db: str | Path | None = None, profile: str | None = None) -> Report:
    """The report of a study that has run, or runs: in a notebook, `deltalab.report("quickstart")` shows it.

    study: its NAME, NAME:PROFILE or id. db: a file or a database's URL; None is ./deltalab.db. profile: an alternative
    to writing NAME:PROFILE.
    Raises `InputError` where there is no such database or study.
    """
    with Store.open(db, create=False) as store:
        return of_store(store, store.study(study, profile).id)


def to_html(found: Report) -> str:
    """The answer of a report as HTML, its text escaped; the costs and the notes are left to `to_frame` and the page."""
    return "\n".join(["<div>", *_lines(found), "</div>"])


def _lines(found: Report) -> Iterator[str]:
    yield f"<p><b>{escape(sentence(found))}</b></p>"
    yield f"<p>{escape(found.title)}</p>"
    for warning in found.warnings:
        yield f"<p>⚠ {escape(warning)}</p>"
    for table in found.tables[:MOST_TABLES]:
        yield from _table(table)
    more = [table.task for table in found.tables[MOST_TABLES:]]
    if more:
        yield f"<p>Further tasks: {escape(', '.join(more))}.</p>"
    failed = failure_lines(found.failures)
    for line in failed[:MOST_FAILURES]:
        yield f"<p>✗ {escape(line)}</p>"
    if failed[MOST_FAILURES:]:
        yield f"<p>✗ {len(failed) - MOST_FAILURES} more trials failed.</p>"
    yield "<p><small><code>to_frame()</code> has every figure, <code>to_markdown()</code> the notes.</small></p>"


def _table(table: TaskTable) -> Iterator[str]:
    yield f"<p>{escape(caption(table))}</p>"
    for warning in table.warnings:
        yield f"<p>⚠ {escape(warning)}</p>"
    names = "".join(f'<th scope="col">{escape(headers(table)[column])}</th>' for column in ANSWER)
    yield f"<table><thead><tr>{names}</tr></thead><tbody>"
    yield from map(_row, table.rows)
    yield "</tbody></table>"


def _row(row: Row) -> str:
    arm, *figures, _ = (escape(cells(row)[column]) for column in ANSWER)
    verdict = escape(short(row))
    if row.verdict in VERDICTS:
        mark, color = VERDICTS[row.verdict]
        verdict = f'<b style="color: {color}">{mark} {verdict}</b>'
    written = "".join(f"<td>{figure}</td>" for figure in (*figures, verdict))
    return f'<tr><th scope="row">{arm}</th>{written}</tr>'
