"""One task of a study: a table of its arms that sorts, and a chart of their differences from the base."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.study.answers.answer import Row, TaskTable
from deltalab.study.reports.report import METRIC, TUNED, caption, cells, headers
from deltalab.study.reports.sentence import best, short
from deltalab_dashboard.charts.arms_by_tasks import arrow
from deltalab_dashboard.colors import BASE, COLORS, MARKS, SHAPES, kind
from deltalab_dashboard.downloads import chart, sortable
from deltalab_dashboard.text import plain

ORDERS = ("as in the study", "by score", "by difference", "by p")
ROWS = 12
"""Rows of a table that are in view; more scroll."""
COSTS = (6, 7, 8, 9, 10)
"""The columns of `cells` that stand behind the switch."""
SEEDS = 1


def draw(of: TaskTable, study: str, order: str, costs: bool) -> None:
    """One task: a table of the arms, then a chart of their differences from the base."""
    st.subheader(plain(caption(of)), anchor=of.task)
    of = replace(of, rows=ordered(of, order))
    frame, columns = typed(of, costs)
    leads = best(of)
    sortable(
        frame.style.apply(lambda row: ["font-weight: bold" if row["arm"] == leads else ""] * len(row), axis=1),
        f"{study} {of.task}",
        text=written(of, costs),
        columns=columns,
        height="content" if len(frame) <= ROWS else 36 * (ROWS + 1),
        placeholder="",
        alt=f"The arms on {caption(of)}",
    )
    rows, seeds = differences(of)
    if len(rows):
        about = "; ".join(
            f"{row.arm} {row.difference:+.3g} [{row.low:+.3g}, {row.high:+.3g}], {row.said}"
            for row in rows.itertuples()
        )
        chart(
            forest(of, rows, seeds),
            f"{study} {of.task} differences",
            rows=seeds.merge(rows, on="arm", suffixes=("", "_mean")) if len(seeds) else rows,
            about=f"Differences from the base in {of.metric} on {of.task}: {about}.",
            caption="Large: the mean and its interval. Small, below it: each seed.",
        )
    if of.warnings:
        st.warning(listed(of.warnings), icon=":material/warning:")
    if of.notes:
        with st.expander(plain(f"Notes on {of.task}")):
            st.markdown(listed(of.notes))


def ordered(of: TaskTable, order: str) -> list[Row]:
    """The rows of a task in an order of `ORDERS`, the best first; rows without the figure come last."""
    sign = -1 if of.maximize else 1

    def key(row: Row) -> float:
        value = {
            "by score": sign * row.score.mean,
            "by difference": sign * row.difference.mean if row.difference else 0.0 if row.is_base else math.nan,
            "by p": row.difference.p if row.difference else math.nan,
        }[order]
        return math.inf if math.isnan(value) else value

    return of.rows if order == ORDERS[0] else sorted(of.rows, key=key)


def typed(of: TaskTable, costs: bool) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of a task with values that sort as what they are, and how Streamlit writes each column."""
    shown, leads = [cells(row) for row in of.rows], best(of)
    compared = any(row.difference for row in of.rows)
    score = f"{of.metric} {arrow(of)}"
    number = st.column_config.NumberColumn
    frame: dict[str, list[Any]] = {
        "arm": [row.arm for row in of.rows],
        "best": ["★ best" if row.arm == leads else "" for row in of.rows],
        "verdict": [marked(row) for row in of.rows],
    }
    columns: dict[str, Any] = {
        "best": st.column_config.TextColumn(help="The best mean. Only the verdict says whether it beats the base."),
        score: number(format="%.4f", help="The mean over seeds."),
    }
    if compared:
        frame["difference"] = [_known(row.difference.mean if row.difference else None) for row in of.rows]
        frame["interval"] = [
            f"[{row.difference.low:+.3f}, {row.difference.high:+.3f}]"
            if row.difference and math.isfinite(row.difference.low)
            else ""
            for row in of.rows
        ]
        frame["p"] = [_known(row.difference.p if row.difference else None) for row in of.rows]
        columns |= {
            "difference": number(format="%+.4f", help="Arm minus base, paired by seed."),
            "interval": st.column_config.TextColumn(help="95%, jointly over the arms that are tested together."),
            "p": number(format="%.3f", help="Of no difference, exact, jointly over the arms."),
        }
    frame[score] = [_known(row.score.mean) for row in of.rows]
    frame["95% interval"] = [cell[METRIC].partition(" ")[2] for cell in shown]
    frame["seeds"] = [cell[SEEDS] for cell in shown]
    if costs:
        frame["us/token"] = [_known(row.microseconds_per_token) for row in of.rows]
        frame["flops/token"] = [_known(row.flops_per_token) for row in of.rows]
        frame["state"] = [_known(row.state_size) for row in of.rows]
        frame["parameters"] = [_known(row.parameters) for row in of.rows]
        columns["us/token"] = number(format="%.3g")
        columns |= {name: number(format="localized") for name in ("flops/token", "state", "parameters")}
    if costs or of.split == "validation":
        frame["tuned"] = [cell[TUNED] for cell in shown]
    return pd.DataFrame({name: column for name, column in frame.items() if any(map(_given, column))}), columns


def written(of: TaskTable, costs: bool) -> list[dict[str, str]]:
    """The same table as text, as the report has it, for files."""
    leads, names = best(of), headers(of)
    rows: list[dict[str, str]] = []
    for row in of.rows:
        said = {
            name: cell
            for at, (name, cell) in enumerate(zip(names, cells(row), strict=True))
            if costs or at not in COSTS
        }
        said["verdict"] = marked(row)
        said["arm"] += " ★" if row.arm == leads else ""
        rows.append({f"{name} {arrow(of)}" if name == of.metric else name: cell for name, cell in said.items()})
    return rows


def marked(row: Row) -> str:
    """A verdict in a word or two, after its shape."""
    compared = row.difference is not None and row.difference.n
    return f"{MARKS[kind(row.verdict)]} {short(row)}" if compared else short(row)


def differences(of: TaskTable) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The differences from the base: a row for each arm, and a row for each seed."""
    compared = [(row, row.difference) for row in of.rows if row.difference and math.isfinite(row.difference.mean)]
    rows = [
        {
            "arm": row.arm,
            "verdict": kind(row.verdict),
            "said": short(row),
            "difference": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "p": difference.p,
            "pairs": difference.n,
        }
        for row, difference in compared
    ]
    seeds = [
        {"arm": row.arm, "verdict": kind(row.verdict), "seed": seed, "difference": apart}
        for row, _ in compared
        for seed, apart in row.by_seed.items()
    ]
    return pd.DataFrame(rows), pd.DataFrame(seeds)


def forest(of: TaskTable, rows: pd.DataFrame, seeds: pd.DataFrame) -> alt.LayerChart | alt.FacetChart:
    """A chart of the differences from the base: the mean and interval of each arm, with a dot for each seed below."""
    where = "higher is better →" if of.maximize else "← lower is better"
    arms = list(rows["arm"])
    look: Any = {
        "y": alt.Y("arm:N", sort=arms, title=None, axis=alt.Axis(labelLimit=0, labelFontSize=13, labelFlush=False)),
        "color": alt.Color(
            "verdict:N",
            scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())),
            legend=alt.Legend(orient="top", title=None, labelLimit=0),
        ),
    }
    base = alt.Chart(rows).encode(
        **look,
        tooltip=[
            "arm:N",
            alt.Tooltip("said:N", title="verdict"),
            *(alt.Tooltip(f"{name}:Q", format=".4f") for name in ("difference", "low", "high", "p")),
            "pairs:Q",
        ],
    )
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color=BASE).encode(x="zero:Q")
    lines = base.mark_rule(strokeWidth=3).encode(
        x=alt.X("low:Q", title=f"{of.metric}, arm minus base ({where})", axis=alt.Axis(tickCount=10, labelFlush=False)),
        x2="high:Q",
    )
    points = base.mark_point(filled=True, size=130, opacity=1).encode(
        x="difference:Q",
        shape=alt.Shape("verdict:N", scale=alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))),
    )
    dots = (
        alt.Chart(seeds)
        .mark_circle(size=26, opacity=0.6, yOffset=11)
        .encode(**look, x="difference:Q", tooltip=["arm:N", "seed:Q", alt.Tooltip("difference:Q", format=".4f")])
    )
    return alt.layer(zero, lines, points, dots).properties(height=alt.Step(38))


def listed(lines: Sequence[str]) -> str:
    """Lines of the report as a list in Markdown."""
    return "\n".join(f"- {plain(line)}" for line in lines)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _given(value: object) -> bool:
    return bool(value) and value == value
