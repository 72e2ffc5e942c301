"""A table with a row for each arm and a column for each task, as papers print it."""

import math

from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.reports.report import Report
from deltalab.study.reports.sentence import DECIDED
from deltalab_dashboard.colors import MARKS

LEGEND = (
    "mean (difference to the base); ▲ better, ▼ worse, ■ equal to the base by the margin, tested together; "
    "★ best mean; † some seeds did not finish"
)
"""Explains the marks in the table's cells."""


def pivot(report: Report) -> list[dict[str, str]]:
    """Returns a row for each arm, with a cell for each task.

    If an arm has no mean on a task, the cell holds a verdict such as `failed`.
    """
    cells: dict[str, dict[str, str]] = {}
    for table in report.all_tables:
        for row in table.rows:
            cell = _cell(row) + (" ★" if row is table.best else "")
            cells.setdefault(row.arm, {"arm": row.arm})[_header(table)] = cell
    return list(cells.values())


def _header(table: TaskTable) -> str:
    """Writes the heading of a task's column."""
    return f"{table.trained}: {table.metric} {arrow(table)}"


def arrow(table: TaskTable) -> str:
    """Returns an arrow: up if higher values of the task's metric are better, else down."""
    return "↑" if table.maximize else "↓"


def _cell(row: Row) -> str:
    """Writes an arm's mean on a task, and its difference to the base."""
    if not math.isfinite(row.score.mean):
        return row.verdict
    text = f"{row.score.mean:.3f}"
    if row.difference is not None and row.difference.n:
        text += f" ({row.difference.mean:+.3f}{f' {MARKS[row.verdict]}' if row.verdict in DECIDED else ''})"
    return text + ("†" if row.score.missing else "")
