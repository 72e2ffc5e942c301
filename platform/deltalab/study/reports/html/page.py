"""Writes a report as one HTML page with its charts, which a browser opens without a server or a network."""

from collections.abc import Iterator, Sequence
from html import escape

from deltalab.study.answers.answer import Answer
from deltalab.study.answers.rows import TaskTable
from deltalab.study.reports.columns import cells, columns, headers
from deltalab.study.reports.html.forest import LEGEND, STYLE, forest
from deltalab.study.reports.lines import (
    COMPARISON_HEADERS,
    COMPARISON_NOTE,
    COMPARISONS,
    TRAINING_HEADERS,
    TRAININGS,
    caption,
    comparison_cells,
    failure_lines,
    ladder_caption,
    ladder_cells,
    ladder_headers,
    ladder_notes,
    metrics_caption,
    metrics_cells,
    metrics_headers,
    search_lines,
    shown_tables,
    title,
    training_cells,
)
from deltalab.study.reports.sentence import sentence

PAGE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2.5rem; }
.answer { font-size: 1.25rem; font-weight: 600; }
.exact { overflow-x: auto; }
.exact table { border-collapse: collapse; font-size: .85em; white-space: nowrap; }
.exact th, .exact td { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid rgba(128,128,128,.25); }
"""


def page(answer: Answer) -> str:
    """Returns a report as a whole HTML page. All text is escaped, and nothing is loaded from elsewhere."""
    lines = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title(answer))}</title><style>{PAGE}{STYLE}</style></head><body>",
        f"<h1>{escape(title(answer))}</h1>",
        f'<p class="answer">{escape(sentence(answer))}</p>',
        *_list(answer.warnings, "⚠ "),
    ]
    if drawn := forest(answer):
        lines += [drawn, f"<p><small>{escape(LEGEND)}</small></p>"]
    for table in shown_tables(answer):
        lines += _task(table)
    for ladder in answer.ladders:
        lines += [_head(ladder_caption(ladder)), *_table(ladder_headers(ladder), ladder_cells(ladder))]
        lines += _list(ladder_notes(ladder))
    for section in search_lines(answer):
        lines += [_head(section.title), *(_table(section.headers, section.rows) if section.rows else [])]
        lines += _list(section.notes)
    lines += [_head("Notes"), *_list([*failure_lines(answer.failures), *answer.notes])]
    if answer.trainings:
        lines += [_head(TRAININGS), *_table(TRAINING_HEADERS, [*map(training_cells, answer.trainings)])]
    if compared := comparison_cells(answer.trainings):
        lines += [_head(COMPARISONS), *_table(COMPARISON_HEADERS, compared), *_list([COMPARISON_NOTE])]
    return "\n".join([*lines, "</body></html>", ""])


def _task(table: TaskTable) -> Iterator[str]:
    """The exact figures of a task, with its warnings and notes."""
    yield _head(caption(table))
    yield from _list(table.warnings, "⚠ ")
    yield from _table(headers(table), [cells(row, columns(table)) for row in table.rows])
    yield from _list(table.notes)
    if table.metrics:
        yield f"<p>{escape(metrics_caption(table))}</p>"
        yield from _table(metrics_headers(table), metrics_cells(table))


def _head(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _list(lines: Sequence[str], mark: str = "") -> list[str]:
    return ["<ul>", *(f"<li>{mark}{escape(line)}</li>" for line in lines), "</ul>"] if lines else []


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    lines = [
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(text)}</td>" for text in rest)}</tr>'
        for first, *rest in rows
    ]
    return ['<div class="exact" tabindex="0">', f"<table><thead><tr>{head}</tr></thead>", *lines, "</table></div>"]
