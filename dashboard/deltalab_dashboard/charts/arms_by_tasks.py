"""Arms by tasks, one cell for each pair: the table for a paper."""

import math

from deltalab.study.answers.answer import Row, TaskTable
from deltalab.study.reports.report import Report
from deltalab.study.reports.sentence import best
from deltalab_dashboard.colors import MARKS

LEGEND = (
    "mean (difference to the base); ▲ better and ▼ worse than the base, p <= 0.05, tested together; ★ best mean; "
    "† some seeds did not finish"
)


def pivot(found: Report) -> list[dict[str, str]]:
    """A row per arm, a column per task. A cell without a figure gives the verdict, such as `failed`."""
    cells: dict[str, dict[str, str]] = {}
    for table in found.tables:
        leads = best(table)
        for row in table.rows:
            cell = _cell(row) + (" ★" if row.arm == leads else "")
            cells.setdefault(row.arm, {"arm": row.arm})[_header(table)] = cell
    return list(cells.values())


def _header(table: TaskTable) -> str:
    return f"{table.task}: {table.metric} {arrow(table)}"


def arrow(table: TaskTable) -> str:
    """The direction in which the metric gets better."""
    return "↑" if table.maximize else "↓"


def _cell(row: Row) -> str:
    if not math.isfinite(row.score.mean):
        return row.verdict
    said = f"{row.score.mean:.3f}"
    if row.difference is not None and row.difference.n:
        said += f" ({row.difference.mean:+.3f}{f' {MARKS[row.verdict]}' if row.verdict in ('better', 'worse') else ''})"
    return said + ("†" if row.score.missing else "")
