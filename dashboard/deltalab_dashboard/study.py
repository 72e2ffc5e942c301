"""The answer of a study: every arm against the base, task by task."""

import math
from typing import get_args

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.study.answer import TaskTable
from deltalab.study.ladder import Ladder
from deltalab.study.report import (
    Report,
    caption,
    cells,
    failure_lines,
    headers,
    ladder_caption,
    ladder_cells,
    ladder_headers,
    ladder_notes,
    report,
)
from deltalab_dashboard.chosen import badge, plain, show
from deltalab_dashboard.pivot import LEGEND, arrow, pivot, to_csv, to_latex

VERDICTS = {"better": "green", "worse": "red", "failed": "red", "diverged": "red"}
SHOWN = 5  # failures; the Trials page lists all
COLORS = {"better": "#1a9850", "worse": "#d73027", "no difference found at this budget": "#8c96a3"}


def page(store: Store, study: Study) -> None:
    head(store, study)
    which: Stage = st.radio(
        "Stage",
        sorted(get_args(Stage)),
        captions=["test split: the answer", "the best candidates, validation split: optimistic"],
        horizontal=True,
        key="stage",
        bind="query-params",
        label_visibility="collapsed",
    )
    found = report(store, study.id, which=which)
    if found.warnings:
        st.warning("\n".join(f"- {plain(warning)}" for warning in found.warnings), icon=":material/warning:")
    if found.failures:
        lines = failure_lines(found.failures)
        rest = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
        st.error("\n".join(f"- {plain(line)}" for line in (*lines[:SHOWN], *rest)))
        st.page_link("trials.py", label="Tracebacks", icon=":material/list:")
    for table in found.tables:
        draw(table)
    if len(found.tables) > 1:
        st.subheader("Arms by tasks", anchor="pivot")
        st.table(
            [{plain(name): plain(cell) for name, cell in row.items()} for row in pivot(found)], border="horizontal"
        )
        st.caption(plain(LEGEND))
    for ladder in found.ladders:
        climb(ladder)
    downloads(found)
    st.caption("\n".join(f"- {plain(note)}" for note in found.notes))
    provenance(study)


def head(store: Store, study: Study) -> None:
    st.title(plain(study.name), anchor=False)
    trials = store.trials(study.id)
    facts = [f"profile {study.profile}"] if study.profile else []
    facts += [f"begun {study.created_at:%Y-%m-%d %H:%M} UTC", f"{len(trials)} trials recorded"]
    if trials:
        facts.append(f"the last at {max(trial.finished_at for trial in trials):%Y-%m-%d %H:%M} UTC")
    st.markdown(f"{badge(study)} {plain(', '.join(facts))}")
    if study.spec.get("description"):
        st.markdown(plain(study.spec["description"]))


def draw(table: TaskTable) -> None:
    """One task: a table of the arms, then a chart of their differences from the base."""
    st.subheader(plain(caption(table)), anchor=table.task)
    lines = [cells(row) for row in table.rows]
    rows: list[dict[str, str]] = [{} for _ in lines]
    for name, column in zip(headers(table), zip(*lines, strict=True), strict=True):
        if not any(column):  # nothing is compared while tuning, for one
            continue
        header = f"{name} {arrow(table)}" if name == table.metric else name
        for row, cell in zip(rows, column, strict=True):
            row[plain(header)] = plain(
                cell.replace(" ", "\u00a0") if "[" in cell else cell
            )  # keep an interval on one line
    for row, about in zip(rows, table.rows, strict=True):
        if color := VERDICTS.get(about.verdict):
            row["verdict"] = f":{color}[{row['verdict']}]"
    st.table(rows, border="horizontal", hide_header=False)
    if table.warnings:
        st.warning("\n".join(f"- {plain(warning)}" for warning in table.warnings), icon=":material/warning:")
    if chart := forest(table):
        st.altair_chart(chart)
    st.caption("\n".join(f"- {plain(note)}" for note in table.notes))


def forest(table: TaskTable) -> alt.LayerChart | alt.FacetChart | None:
    """A chart of the differences from the base with their intervals; None if nothing is compared."""
    rows = [
        {
            "arm": row.arm,
            "verdict": row.verdict,
            "difference": row.difference.mean,
            "low": row.difference.low,
            "high": row.difference.high,
            "p": row.difference.p,
            "pairs": row.difference.n,
        }
        for row in table.rows
        if row.difference and math.isfinite(row.difference.mean)
    ]
    if not rows:
        return None
    where = "higher is better →" if table.maximize else "← lower is better"
    base = alt.Chart(pd.DataFrame(rows)).encode(
        y=alt.Y("arm:N", sort=None, title=None, axis=alt.Axis(labelLimit=0, labelFontSize=13, labelFlush=False)),
        color=alt.Color(
            "verdict:N",
            scale=alt.Scale(domain=list(COLORS), range=list(COLORS.values())),
            legend=alt.Legend(orient="top", title=None, labelLimit=0),
        ),
        tooltip=[
            "arm:N",
            "verdict:N",
            *(alt.Tooltip(f"{name}:Q", format=".4f") for name in ("difference", "low", "high", "p")),
            "pairs:Q",
        ],
    )
    zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color="#8c96a3").encode(x="zero:Q")
    lines = base.mark_rule(strokeWidth=2.5).encode(
        x=alt.X(
            "low:Q", title=f"{table.metric}, arm minus base ({where})", axis=alt.Axis(tickCount=10, labelFlush=False)
        ),
        x2="high:Q",
    )
    points = base.mark_point(filled=True, size=90, opacity=1).encode(x="difference:Q")
    return alt.layer(zero, lines, points).properties(height=alt.Step(30))


def climb(ladder: Ladder) -> None:
    """A ladder: a chart of the arms' differences from the base against size, then the table of trends."""
    st.subheader(plain(ladder_caption(ladder)), anchor=f"ladder-{ladder.task}")
    rows = [
        {
            "arm": f"{row.arm}: {row.verdict}",
            "compute": size.compute,
            "size": size.label,
            "difference": difference.mean,
            "low": difference.low,
            "high": difference.high,
        }
        for row in ladder.arms
        for size, difference in zip(ladder.sizes, row.differences, strict=False)
        if math.isfinite(difference.low)
    ]
    if rows:
        base = alt.Chart(pd.DataFrame(rows)).encode(
            x=alt.X("compute:Q", title="operations of the base's training", scale=alt.Scale(type="log")),
            color=alt.Color("arm:N", sort=None, legend=alt.Legend(orient="top", title=None, labelLimit=0, columns=2)),
            tooltip=["arm:N", "size:N", *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("difference", "low", "high"))],
        )
        zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color="#8c96a3").encode(y="zero:Q")
        intervals = base.mark_rule(strokeWidth=2, opacity=0.5).encode(
            y=alt.Y("low:Q", title=f"{ladder.metric}, arm minus base"), y2="high:Q"
        )
        st.altair_chart(alt.layer(zero, intervals, base.mark_line(point=True).encode(y="difference:Q")))
    names = ladder_headers(ladder)
    st.table(
        [
            {plain(name): plain(cell.replace(" ", "\u00a0")) for name, cell in zip(names, row, strict=True)}
            for row in ladder_cells(ladder)
        ],
        border="horizontal",
    )
    st.caption("\n".join(f"- {plain(note)}" for note in ladder_notes(ladder)))


def downloads(found: Report) -> None:
    rows = pivot(found)
    files = {
        "CSV": (found.to_csv(), "csv"),
        "Markdown": (found.to_markdown(), "md"),
        "JSON": (found.to_json(), "json"),
        "Arms by tasks, LaTeX": (to_latex(rows), "tex"),
        "Arms by tasks, CSV": (to_csv(rows), "pivot.csv"),
    }
    with st.container(horizontal=True):
        for label, (text, ending) in files.items():
            st.download_button(label, text, f"{found.study}.{ending}", icon=":material/download:", on_click="ignore")


def provenance(study: Study) -> None:
    with st.expander("Provenance and settings"):
        # Leave out the command: a database URL in it may hold a password.
        st.json({key: value for key, value in study.provenance.items() if key not in ("command", "earlier", "tasks")})
        st.json(study.spec, expanded=False)


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
