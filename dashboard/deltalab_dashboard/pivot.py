"""Arms by tasks, one cell for each pair: the table for a paper."""

import csv
import io
import math
import re

from deltalab.study.answer import Row, TaskTable
from deltalab.study.report import Report

LEGEND = "mean (difference to the base); * p <= 0.05, tested together; † some seeds did not finish"
LATEX = str.maketrans(
    {character: rf"\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"↑": r"$\uparrow$", "↓": r"$\downarrow$", "†": r"$^\dagger$", "*": "$^*$"}
)


def pivot(found: Report) -> list[dict[str, str]]:
    """A row per arm, a column per task. A cell without a figure gives the verdict, such as `failed`."""
    cells: dict[str, dict[str, str]] = {}
    for table in found.tables:
        for row in table.rows:
            cells.setdefault(row.arm, {"arm": row.arm})[_header(table)] = _cell(row)
    return list(cells.values())


def to_csv(rows: list[dict[str, str]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def to_latex(rows: list[dict[str, str]]) -> str:
    """A `tabular` for the package booktabs."""
    lines = [" & ".join(map(_latex, line)) + r" \\" for line in (rows[0], *(row.values() for row in rows))]
    columns = "l" + "r" * (len(rows[0]) - 1)
    return "\n".join(
        [
            f"% {LEGEND}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            "",
        ]
    )


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
        said += f" ({row.difference.mean:+.3f}{'*' if row.verdict in ('better', 'worse') else ''})"
    return said + ("†" if row.score.missing else "")


def _latex(text: str) -> str:
    r"""Text as LaTeX.

    >>> print(_latex("without_d"), _latex("0.486 (-0.435*)"))
    without\_d 0.486 ($-$0.435$^*$)
    """
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", text.translate(LATEX))
