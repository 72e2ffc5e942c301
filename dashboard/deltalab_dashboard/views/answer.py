"""The answer of a study: every arm against the base, task by task."""

import math
from typing import get_args

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.study.answers.ladder_trends import Ladder
from deltalab.study.reports.report import (
    Report,
    failure_lines,
    ladder_caption,
    ladder_cells,
    ladder_headers,
    ladder_notes,
)
from deltalab.study.reports.sentence import counts, sentence
from deltalab_dashboard import cache
from deltalab_dashboard.charts.arms_by_tasks import LEGEND, pivot
from deltalab_dashboard.charts.task_table import ORDERS, draw, listed
from deltalab_dashboard.colors import BASE, MARKS, arms
from deltalab_dashboard.downloads import chart, table
from deltalab_dashboard.frame import show
from deltalab_dashboard.progress import shown as progress
from deltalab_dashboard.text import badge, plain

FAILURES = 3  # that the page lists; the Trials page lists all


def page(store: Store, study: Study) -> None:
    head(store, study)
    answer = st.container()  # above what it depends on
    stage, order, costs = view(store, study)
    found = cache.found(store, study, stage)
    with answer:
        verdict(found)
    if len(found.tables) > 1:
        st.subheader("Arms by tasks", anchor="pivot")
        table(pivot(found), f"{study.name} arms by tasks", legend=LEGEND)
    for one in found.tables:
        draw(one, study.name, order, costs)
    for ladder in found.ladders:
        climb(ladder, study.name)
    with st.expander("How to read this page"):
        st.markdown(listed(found.notes))
    with st.expander("The whole report as a file"):
        downloads(found)
    provenance(study)


def head(store: Store, study: Study) -> None:
    st.title(plain(study.name), anchor=False)
    trials = [trial for trial in store.trials(study.id) if trial.state != "infeasible"]
    facts = [f"profile {study.profile}"] if study.profile else []
    facts += [f"begun {study.created_at:%Y-%m-%d %H:%M} UTC", f"{len(trials)} trials recorded"]
    if trials:
        facts.append(f"the last at {max(trial.finished_at for trial in trials):%Y-%m-%d %H:%M} UTC")
    st.markdown(f"{badge(study)} {plain(', '.join(facts))}")
    if study.spec.get("description"):
        st.caption(plain(study.spec["description"]))
    progress(store, study)


# The key of the session with the study that the page showed last, and the stage that it opened with.
OPENED = "stage at first"


def view(store: Store, study: Study) -> tuple[Stage, str, bool]:
    """What the page shows, as its URL keeps it: the stage, the order of the arms, whether with costs."""
    first = first_stage(store, study)
    opened = st.session_state.get(OPENED)
    if opened not in (None, (study.id, first)) and st.session_state.get("stage") == opened[1]:
        st.session_state.pop("stage")  # nobody chose it, and it is not this study's, or no longer
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
    """The stage that the page opens with: tuning until a confirmed trial exists."""
    stages = {trial.stage for trial in store.trials(study.id)}
    return "tune" if stages == {"tune"} else "confirm"


def verdict(found: Report) -> None:
    """The answer in one sentence, how many comparisons came out how, what failed, and what makes it doubtful."""
    st.subheader(plain(sentence(found)), anchor="answer")
    how_many = {what: n for what, n in counts(found).items() if n}
    if how_many:
        st.markdown(" \u2003 ".join(f"{MARKS[what]} {n} {what}" for what, n in how_many.items()))
    if found.failures:
        lines = failure_lines(found.failures)
        rest = [f"and {len(lines) - FAILURES} more"] if len(lines) > FAILURES else []
        with st.container(horizontal=True, vertical_alignment="center"):
            st.error(listed([*lines[:FAILURES], *rest]))
            st.page_link("views/trials.py", label="Tracebacks", icon=":material/list:", width="content")
    if found.warnings:
        st.warning(listed(found.warnings), icon=":material/warning:")


def climb(ladder: Ladder, study: str) -> None:
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
        points = pd.DataFrame(rows)
        colors = arms(list(dict.fromkeys(points["arm"])), None)
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
            about=f"Differences from the base in {ladder.metric} against operations of training, a line for each arm.",
        )
    names = ladder_headers(ladder)
    table([dict(zip(names, row, strict=True)) for row in ladder_cells(ladder)], f"{study} trends of {ladder.task}")
    st.caption(listed(ladder_notes(ladder)))


def downloads(found: Report) -> None:
    """The report as `platform study report` writes it."""
    files = {"CSV": (found.to_csv, "csv"), "Markdown": (found.to_markdown, "md"), "JSON": (found.to_json, "json")}
    with st.container(horizontal=True):
        for label, (made, ending) in files.items():
            st.download_button(label, made, f"{found.study}.{ending}", icon=":material/download:", on_click="ignore")


def provenance(study: Study) -> None:
    with st.expander("Provenance and settings"):
        # Leave out the command: a database URL in it may hold a password.
        st.json({key: value for key, value in study.provenance.items() if key not in ("command", "earlier", "tasks")})
        st.json(study.spec, expanded=False)


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
