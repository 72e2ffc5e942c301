"""Draws a study's arms on one task: a table that readers can sort, and a chart of the differences from the base."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.reports.columns import COLUMNS, Column, Group, columns
from deltalab.study.reports.lines import caption, metrics_caption, metrics_cells, metrics_headers
from deltalab.study.reports.sentence import short_verdict
from deltalab_dashboard import downloads
from deltalab_dashboard.charts.arms_by_tasks import arrow
from deltalab_dashboard.colors import BASE, COLORS, MARKS, SHAPES, kind
from deltalab_dashboard.text import bullets, plain

ORDERS = ("as in the study", "by score", "by difference", "by p")
"""The orders in which a table can list the arms."""
ROWS = 30
"""The most rows of a table that are in view at a time. A longer table scrolls."""
ROW_PIXELS = 31
"""The height of a row of a table."""
FIRST = ("arm", "verdict", "difference", "p", "score")
"""The columns that come first in a table on a page, each by its key, or by its heading if it has no key.

The other columns follow in the order of the report.
"""
SCORE = "score"
"""The name of the column of scores, whose heading is the metric."""
PICKABLE = tuple(column.head.format(metric=SCORE) for column in COLUMNS if column.group in ("answer", "cost", "tuned"))
"""The names of the columns that a reader can pick."""


def draw_task(table: TaskTable, study: str, order: str, costs: bool, picked: Sequence[str] = ()) -> None:
    """Draws a table of the arms on a task, and below it a chart of the arms' differences from the base.

    Args:
        table: The arms on the task.
        study: The name of the study.
        order: One of `ORDERS`.
        costs: Whether a second table shows the costs and the tuned values of the arms.
        picked: The columns of the table, of `PICKABLE`. If empty, the table has those of the answer.
    """
    st.subheader(plain(caption(table)), anchor=table.task.replace(" ", "-"))
    table = replace(table, rows=sorted_rows(table, order))
    groups: list[Group] = ["name", "answer", "tuned"] if table.split == "validation" else ["name", "answer"]
    shown = columns(table, *groups)
    if picked:
        shown = [column for column in columns(table) if column.group == "name" or _name(column) in picked]
    _draw_columns(table, shown, f"{study} {table.task}", f"The arms on {caption(table)}")
    if costs and not table.over:
        # A table of its own: beside the answer, the last columns would be beyond the edge of a screen.
        of_costs = columns(table, "name", "cost", "tuned")
        _draw_columns(table, of_costs, f"{study} {table.task} costs", f"What the arms cost on {caption(table)}")
    rows, seeds = difference_rows(table)
    if len(rows):
        differences = "; ".join(
            f"{row.arm} {row.difference:+.3g} [{row.low:+.3g}, {row.high:+.3g}], {row.said}"
            for row in rows.itertuples()
        )
        downloads.chart(
            forest(table, rows, seeds),
            f"{study} {table.task} differences",
            rows=seeds.merge(rows, on="arm", suffixes=("", "_mean")) if len(seeds) else rows,
            description=f"Differences from the base in {table.metric} on {table.task}: {differences}.",
            caption="Large: the mean and its interval. Small, below it: each seed.",
        )
    if table.warnings:
        st.warning(bullets(table.warnings), icon=":material/warning:")
    if table.metrics:
        with st.expander(plain(metrics_caption(table))):
            names = metrics_headers(table)
            rows_of_text = [dict(zip(names, line, strict=True)) for line in metrics_cells(table)]
            downloads.table(rows_of_text, f"{study} {table.task} further metrics")
    if table.notes:
        with st.expander(plain(f"Notes on {table.task}")):
            st.markdown(bullets(table.notes))


def _draw_columns(table: TaskTable, shown: Sequence[Column], name: str, description: str) -> None:
    """Draws the given columns, the best arm in bold."""
    frame, config = typed_table(table, shown)
    best = table.best
    downloads.sortable(
        frame.style.apply(
            lambda row: ["font-weight: bold" if best and row["arm"] == best.arm else ""] * len(row), axis=1
        ),
        name,
        text=text_table(table, shown),
        columns=config,
        height="content" if len(frame) <= ROWS else ROW_PIXELS * (ROWS + 1),
        placeholder="",
        alt=description,
    )


def sorted_rows(table: TaskTable, order: str) -> list[Row]:
    """Returns the rows of a task in one of the `ORDERS`.

    If the order is by a figure, the best row comes first, and rows without that figure come last.
    """

    def key(row: Row) -> float:
        """Returns the figure to sort by, which is smaller for a better row, or infinity if the row has none."""
        value = {
            "by score": -table.sign * row.score.mean,
            "by difference": -table.sign * row.difference.mean if row.difference else 0.0 if row.is_base else math.nan,
            "by p": row.difference.p if row.difference else math.nan,
        }[order]
        return math.inf if math.isnan(value) else value

    return table.rows if order == ORDERS[0] else sorted(table.rows, key=key)


def typed_table(table: TaskTable, shown: Sequence[Column]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Returns the given columns with typed values, and their `column_config` for Streamlit.

    Typed values let a reader sort a column of numbers by their size.
    """
    frame: dict[str, list[Any]] = {}
    config: dict[str, Any] = {}
    for column in _in_order(shown):
        head = _head(column, table)
        if column.key == "verdict":
            frame[head] = [verdict_text(row) for row in table.rows]
        elif column.number:
            figures = [column.value(row) for row in table.rows]
            frame[head] = [_number(figure.mean if column.bounds_head and figure else figure) for figure in figures]
            config[head] = st.column_config.NumberColumn(format=column.number, help=column.help)
        else:
            frame[head] = [column.text(row) for row in table.rows]
            if column.help:
                config[head] = st.column_config.TextColumn(help=column.help)
        if column.bounds_head:
            frame[column.bounds_head] = [column.text(row).partition(" ")[2] for row in table.rows]
        if column.group == "name" and any(other.group == "answer" for other in shown):
            frame["best"] = ["★ best" if row is table.best else "" for row in table.rows]
            best_help = "The best mean. Only the verdict says whether it beats the base."
            config["best"] = st.column_config.TextColumn(help=best_help)
    return pd.DataFrame({head: cells for head, cells in frame.items() if any(map(_is_known, cells))}), config


def text_table(table: TaskTable, shown: Sequence[Column]) -> list[dict[str, str]]:
    """Returns the given columns as text, as the report writes it. The downloaded files hold this text."""
    rows: list[dict[str, str]] = []
    for row in table.rows:
        texts = {_head(column, table): column.text(row) for column in shown}
        if "verdict" in texts:
            texts["verdict"] = verdict_text(row)
        texts["arm"] += " ★" if row is table.best else ""
        rows.append(texts)
    return rows


def _in_order(shown: Sequence[Column]) -> list[Column]:
    """Moves the columns of `FIRST` to the front."""
    places = {key: at for at, key in enumerate(FIRST)}
    return sorted(shown, key=lambda column: places.get(column.key or column.head, len(FIRST)))


def _name(column: Column) -> str:
    """Returns the name of a column in `PICKABLE`, which is the same for all tasks."""
    return column.head.format(metric=SCORE)


def _head(column: Column, table: TaskTable) -> str:
    """Writes the heading of a column. An arrow in the score's heading tells whether higher or lower is better."""
    return f"{column.head_of(table)} {arrow(table)}" if column.key == "score" else column.head_of(table)


def verdict_text(row: Row) -> str:
    """Writes a row's verdict in a word or two. If the arm was compared, the mark of the verdict comes first."""
    compared = row.difference is not None and row.difference.n
    return f"{MARKS[kind(row.verdict)]} {short_verdict(row)}" if compared else short_verdict(row)


def difference_rows(table: TaskTable) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Returns two tables of the differences from the base: a row for each arm, and a row for each seed of each arm."""
    compared = [(row, row.difference) for row in table.rows if row.difference and math.isfinite(row.difference.mean)]
    rows = [
        {
            "arm": row.arm,
            "verdict": kind(row.verdict),
            "said": short_verdict(row),
            "difference": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "p": difference.p,
            "pairs": difference.n,
        }
        for row, difference in compared
    ]
    seeds = [
        {"arm": row.arm, "verdict": kind(row.verdict), "seed": seed, "difference": difference}
        for row, _ in compared
        for seed, difference in row.by_seed.items()
    ]
    return pd.DataFrame(rows), pd.DataFrame(seeds)


def forest(table: TaskTable, rows: pd.DataFrame, seeds: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """Draws each arm's mean difference from the base with its interval, and below it a dot for each seed.

    A band shows the differences that the margin counts as equal.

    Args:
        table: The arms on the task.
        rows: The first table that `difference_rows` returns.
        seeds: The second table that `difference_rows` returns.
    """
    better = "higher is better →" if table.maximize else "← lower is better"
    arms = list(rows["arm"])
    channels: Any = {
        "y": alt.Y("arm:N", sort=arms, title=None, axis=alt.Axis(labelLimit=0, labelFontSize=13, labelFlush=False)),
        "color": alt.Color(
            "verdict:N",
            scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())),
            legend=alt.Legend(orient="top", title=None, labelLimit=0),
        ),
    }
    base = alt.Chart(rows).encode(
        **channels,
        tooltip=[
            "arm:N",
            alt.Tooltip("said:N", title="verdict"),
            *(alt.Tooltip(f"{name}:Q", format=".4f") for name in ("difference", "low", "high", "p")),
            "pairs:Q",
        ],
    )
    margin = pd.DataFrame({"low": [-table.margin], "high": [table.margin]})
    equal = alt.Chart(margin).mark_rect(color=BASE, opacity=0.15).encode(x="low:Q", x2="high:Q")
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color=BASE).encode(x="zero:Q")
    lines = base.mark_rule(strokeWidth=3).encode(
        x=alt.X(
            "low:Q", title=f"{table.metric}, arm minus base ({better})", axis=alt.Axis(tickCount=10, labelFlush=False)
        ),
        x2="high:Q",
    )
    points = base.mark_point(filled=True, size=130, opacity=1).encode(
        x="difference:Q",
        shape=alt.Shape("verdict:N", scale=alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))),
    )
    dots = (
        alt.Chart(seeds)
        .mark_circle(size=26, opacity=0.6, yOffset=11)
        .encode(**channels, x="difference:Q", tooltip=["arm:N", "seed:Q", alt.Tooltip("difference:Q", format=".4f")])
    )
    return alt.layer(zero, lines, points, dots, equal).properties(height=alt.Step(38))


def _number(value: float | None) -> float:
    """Returns the value, or NaN if the value is None."""
    return math.nan if value is None else value


def _is_known(value: object) -> bool:
    """Returns whether a cell holds a value other than None, NaN, zero or empty text."""
    return bool(value) and value == value
