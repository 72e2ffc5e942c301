"""Writes the answer of a study as HTML, for notebooks."""

from collections.abc import Iterator
from html import escape

from deltalab.study.answers.answer import Answer
from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.reports.columns import Column, Group, columns, headers
from deltalab.study.reports.html.forest import VERDICTS
from deltalab.study.reports.lines import caption, failure_lines, metrics_caption, metrics_cells, metrics_headers, title
from deltalab.study.reports.sentence import sentence, short_verdict

MOST_TABLES = 4
"""How many tables are shown; tasks beyond this number are only named."""
MOST_FAILURES = 3
"""How many failed trials are shown; failed trials beyond this number are only counted."""

ANSWERING: tuple[Group, ...] = ("name", "answer")
"""The columns that a notebook shows. Costs are left out; `Report.to_frame` has them."""


def to_html(answer: Answer) -> str:
    """Returns the answer as HTML with its text escaped. Only other forms of a report show costs and notes."""
    return "\n".join(["<div>", *_lines(answer), "</div>"])


def _lines(answer: Answer) -> Iterator[str]:
    yield f"<p><b>{escape(sentence(answer))}</b></p>"
    yield f"<p>{escape(title(answer))}</p>"
    for warning in answer.warnings:
        yield f"<p>⚠ {escape(warning)}</p>"
    for table in answer.all_tables[: len(answer.all_tables) - len(answer.tables) + MOST_TABLES]:
        yield from _table(table)
    more = [table.task for table in answer.tables[MOST_TABLES:]]
    if more:
        yield f"<p>Further tasks: {escape(', '.join(more))}.</p>"
    failures = failure_lines(answer.failures)
    for line in failures[:MOST_FAILURES]:
        yield f"<p>✗ {escape(line)}</p>"
    if failures[MOST_FAILURES:]:
        yield f"<p>✗ {len(failures) - MOST_FAILURES} more trials failed.</p>"
    yield "<p><small><code>to_frame()</code> has every figure, <code>to_markdown()</code> the notes.</small></p>"


def _table(table: TaskTable) -> Iterator[str]:
    yield f"<p>{escape(caption(table))}</p>"
    for warning in table.warnings:
        yield f"<p>⚠ {escape(warning)}</p>"
    headings = "".join(
        f'<th scope="col">{escape(heading)}</th>' for heading in headers(table, columns(table, *ANSWERING))
    )
    yield f"<table><thead><tr>{headings}</tr></thead><tbody>"
    for row in table.rows:
        yield f"<tr>{''.join(_cell(row, column) for column in columns(table, *ANSWERING))}</tr>"
    yield "</tbody></table>"
    if table.metrics:
        yield f"<p>{escape(metrics_caption(table))}</p>"
        headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in metrics_headers(table))
        yield f"<table><thead><tr>{headings}</tr></thead><tbody>"
        for arm, *texts in metrics_cells(table):
            yield f'<tr><th scope="row">{escape(arm)}</th>{"".join(f"<td>{escape(text)}</td>" for text in texts)}</tr>'
        yield "</tbody></table>"


def _cell(row: Row, column: Column) -> str:
    text = escape(column.text(row))
    if column.group == "name":
        return f'<th scope="row">{text}</th>'
    if column.key == "verdict":
        text = escape(short_verdict(row))
        if row.verdict in VERDICTS:
            mark, color = VERDICTS[row.verdict]
            text = f'<b style="color: {color}">{mark} {text}</b>'
    return f"<td>{text}</td>"
