"""The page Answer: every arm of a study against the base, task by task."""

import math
from typing import get_args

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.reports.lines import failure_lines, ladder_caption, ladder_cells, ladder_headers, ladder_notes
from deltalab.study.reports.report import Report
from deltalab.study.reports.sentence import sentence, verdict_counts
from deltalab_dashboard import cache
from deltalab_dashboard.charts.arms_by_tasks import LEGEND, pivot
from deltalab_dashboard.charts.task_table import ORDERS, draw_task
from deltalab_dashboard.colors import BASE, MARKS, arm_colors
from deltalab_dashboard.downloads import chart, table
from deltalab_dashboard.frame import show
from deltalab_dashboard.progress import draw_progress
from deltalab_dashboard.text import badge, bullets, plain

# The most failures that this page lists. The page Trials lists all failures.
FAILURES = 3


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    head(store, study)
    answer = st.container()  # The answer stands above the widgets, but it depends on what they return.
    stage, order, costs = options(store, study)
    report = cache.report_of(store, study, stage)
    with answer:
        verdict(report)
    if report.headline:
        draw_task(report.headline, study.name, order, costs)
    if len(report.tables) > 1:
        st.subheader("Arms by tasks", anchor="pivot")
        table(pivot(report), f"{study.name} arms by tasks", legend=LEGEND)
    for task_table in report.tables:
        draw_task(task_table, study.name, order, costs)
    for ladder in report.ladders:
        ladder_section(ladder, study.name)
    with st.expander("How to read this page"):
        st.markdown(bullets(report.notes))
    with st.expander("The whole report as a file"):
        report_files(report)
    provenance(study)


def head(store: Store, study: Study) -> None:
    """Draws the study's name, the times at which it ran, and its progress."""
    st.title(plain(study.name), anchor=False)
    trials = [trial for trial in store.trials(study.id) if trial.state != "infeasible"]
    facts = [f"profile {study.profile}"] if study.profile else []
    facts += [f"begun {study.created_at:%Y-%m-%d %H:%M} UTC", f"{len(trials)} trials recorded"]
    if trials:
        facts.append(f"the last at {max(trial.finished_at for trial in trials):%Y-%m-%d %H:%M} UTC")
    st.markdown(f"{badge(study)} {plain(', '.join(facts))}")
    if study.spec.get("description"):
        st.caption(plain(study.spec["description"]))
    draw_progress(store, study)


# The session's key for a pair: the id of the study that the page showed last, and the stage with which it opened.
OPENED = "stage at first"


def options(store: Store, study: Study) -> tuple[Stage, str, bool]:
    """Draws the choices of the stage, of the order of the arms, and of whether to show costs.

    The address keeps the choices.
    """
    first = first_stage(store, study)
    opened = st.session_state.get(OPENED)
    if opened not in (None, (study.id, first)) and st.session_state.get("stage") == opened[1]:
        # The reader did not choose this stage. The page opened with the stage for another study, or before the first
        # confirmed trial existed. The page now opens with another stage.
        st.session_state.pop("stage")
        st.query_params.pop("stage", None)
    st.session_state[OPENED] = study.id, first
    with st.container(horizontal=True, vertical_alignment="bottom", gap="large"):
        stage: Stage = st.radio(
            "Stage",
            sorted(get_args(Stage)),
            index=sorted(get_args(Stage)).index(first),
            help="confirm: the test split, the answer. tune: the best candidates on the validation split, optimistic.",
            horizontal=True,
            key="stage",
            bind="query-params",
            width="content",
        )
        order = st.selectbox("Order of the arms", ORDERS, key="order", bind="query-params", width=200)
        costs = st.toggle("Costs and tuned values", key="costs", bind="query-params")
    return stage, order, costs


def first_stage(store: Store, study: Study) -> Stage:
    """Returns the stage with which the page opens: `tune` if only trials of tuning are recorded, else `confirm`."""
    stages = {trial.stage for trial in store.trials(study.id)}
    return "tune" if stages == {"tune"} else "confirm"


def verdict(report: Report) -> None:
    """Draws the answer in one sentence, the number of arms with each verdict, the failures, and the warnings."""
    st.subheader(plain(sentence(report)), anchor="answer")
    counts = {kind: n for kind, n in verdict_counts(report).items() if n}
    if counts:
        st.markdown(" \u2003 ".join(f"{MARKS[kind]} {n} {kind}" for kind, n in counts.items()))
    if report.failures:
        lines = failure_lines(report.failures)
        rest = [f"and {len(lines) - FAILURES} more"] if len(lines) > FAILURES else []
        with st.container(horizontal=True, vertical_alignment="center"):
            st.error(bullets([*lines[:FAILURES], *rest]))
            st.page_link("views/trials.py", label="Tracebacks", icon=":material/list:", width="content")
    if report.warnings:
        st.warning(bullets(report.warnings), icon=":material/warning:")


def ladder_section(ladder: TaskLadder, study: str) -> None:
    """Draws a chart of the arms' differences from the base against size, and below it the table of trends."""
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
        points = pd.DataFrame(rows)
        colors = arm_colors(list(dict.fromkeys(points["arm"])), None)
        base = alt.Chart(points).encode(
            x=alt.X("compute:Q", title="operations of the base's training", scale=alt.Scale(type="log")),
            color=alt.Color(
                "arm:N",
                sort=None,
                scale=alt.Scale(domain=list(colors), range=list(colors.values())),
                legend=alt.Legend(orient="top", title=None, labelLimit=0, columns=2),
            ),
            tooltip=["arm:N", "size:N", *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("difference", "low", "high"))],
        )
        zero = alt.Chart(pd.DataFrame({"zero": [0.0]})).mark_rule(strokeDash=[4, 4], color=BASE).encode(y="zero:Q")
        intervals = base.mark_rule(strokeWidth=2, opacity=0.5).encode(
            y=alt.Y("low:Q", title=f"{ladder.metric}, arm minus base"), y2="high:Q"
        )
        lines = base.mark_line(point=alt.OverlayMarkDef(size=60)).encode(
            y="difference:Q", shape=alt.Shape("arm:N", sort=None, legend=None)
        )
        chart(
            alt.layer(zero, intervals, lines),
            f"{study} ladder of {ladder.task}",
            rows=points,
            description=f"Differences from the base in {ladder.metric} against operations of training, "
            "a line for each arm.",
        )
    names = ladder_headers(ladder)
    table([dict(zip(names, row, strict=True)) for row in ladder_cells(ladder)], f"{study} trends of {ladder.task}")
    st.caption(bullets(ladder_notes(ladder)))


def report_files(report: Report) -> None:
    """Draws buttons that download the report in the formats that `platform study report` writes."""
    files = {"CSV": (report.to_csv, "csv"), "Markdown": (report.to_markdown, "md"), "JSON": (report.to_json, "json")}
    with st.container(horizontal=True):
        for label, (content, ending) in files.items():
            st.download_button(
                label, content, f"{report.study}.{ending}", icon=":material/download:", on_click="ignore"
            )


def provenance(study: Study) -> None:
    """Draws the provenance of the study, such as its machine and versions, and the content of the study's file."""
    with st.expander("Provenance and settings"):
        # The command is left out, since it may contain a database's URL with a password.
        st.json({key: value for key, value in study.provenance.items() if key not in ("command", "earlier", "tasks")})
        st.json(study.spec, expanded=False)


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
