"""The page Answer: every arm of a study against the base, task by task."""

import json
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from shlex import quote
from typing import NamedTuple, get_args

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.answers.rows import TaskTable
from deltalab.study.reports.html.forest import LEGEND as FOREST_LEGEND
from deltalab.study.reports.html.forest import STYLE, forest
from deltalab.study.reports.lines import failure_lines, ladder_caption, ladder_cells, ladder_headers, ladder_notes
from deltalab.study.reports.report import Report
from deltalab.study.reports.sentence import sentence, verdict_counts
from deltalab_dashboard import cache
from deltalab_dashboard.charts.arms_by_tasks import LEGEND, pivot
from deltalab_dashboard.charts.task_table import ORDERS, PICKABLE, draw_task
from deltalab_dashboard.colors import BASE, MARKS, arm_colors
from deltalab_dashboard.downloads import chart, table, table_files
from deltalab_dashboard.frame import STUDY, show
from deltalab_dashboard.progress import draw_progress
from deltalab_dashboard.text import badge, bullets, notes, plain

# The most failures that this page lists. The page Trials lists all failures.
FAILURES = 3


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    head(store, study)
    answer = st.container()  # The answer stands above the widgets, but it depends on what they return.
    shown = options(store, study)
    stage = shown.stage
    report = cache.report_of(store, study, stage)
    with answer:
        verdict(report)
        at_a_glance(store, study, report, shown.arms)
    if shown.tables:
        for task_table in of_arms(report, shown.arms).all_tables:
            draw_task(task_table, study.name, shown.order, shown.costs, shown.columns)
    for ladder in report.ladders:
        ladder_section(ladder, study.name)
    with st.expander("How to read this page"):
        st.markdown(bullets(report.notes))
    with st.expander("The whole report as a file"):
        report_files(store, study, stage)
    provenance(study)


def head(store: Store, study: Study) -> None:
    """Draws the study's name, the times at which it ran, its notes, and its progress."""
    st.title(plain(study.name), anchor=False)
    trials = [trial for trial in store.trials(study.id) if trial.state != "infeasible"]
    facts = [f"profile {study.profile}"] if study.profile else []
    facts += [f"begun {study.created_at:%Y-%m-%d %H:%M} UTC", f"{len(trials)} trials recorded"]
    if trials:
        facts.append(f"the last at {max(trial.finished_at for trial in trials):%Y-%m-%d %H:%M} UTC")
    st.markdown(f"{badge(study)} {plain(', '.join(facts))}")
    if study.spec.get("description"):
        st.caption(plain(study.spec["description"]))
    if study.notes:
        st.markdown(notes(study.notes))
    draw_progress(store, study)


class Shown(NamedTuple):
    """What the reader chose to see.

    Attributes:
        stage: The stage whose scores are shown.
        arms: The arms beside the base. If empty, all arms are shown.
        tables: Whether exact tables are shown.
        order: The order of the arms in exact tables.
        columns: The columns of exact tables. If empty, they have those of the answer.
        costs: Whether exact tables of costs are shown.
    """

    stage: Stage
    arms: list[str]
    tables: bool
    order: str
    columns: list[str]
    costs: bool


# The session's key for a pair: the id of the study that the page showed last, and the stage with which it opened.
OPENED = "stage at first"


def options(store: Store, study: Study) -> Shown:
    """Draws the choices of the stage and the arms, of whether to show exact tables, and of their order and columns.

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
        names = [arm.name for arm in store.arms(study.id) if not arm.is_base]
        arms = st.multiselect("Arms", names, placeholder="all", key="arms", bind="query-params", width=320)
        tables = st.toggle("Exact tables", key="tables", bind="query-params")
    order, columns, costs = ORDERS[0], list[str](), False
    if tables:
        with st.container(horizontal=True, vertical_alignment="bottom", gap="large"):
            order = st.selectbox("Order of the arms", ORDERS, key="order", bind="query-params", width=200)
            columns = st.multiselect(
                "Columns", PICKABLE, placeholder="those of the answer", key="columns", bind="query-params", width=400
            )
            costs = st.toggle("Costs and tuned values", key="costs", bind="query-params")
    return Shown(stage, arms, tables, order, columns, costs)


def of_arms(report: Report, arms: Collection[str]) -> Report:
    """Returns the report with the rows of the given arms and the base alone. Figures stay those of the whole study."""
    if not arms:
        return report

    def kept(table: TaskTable) -> TaskTable:
        """Returns a table with the rows to show."""
        return replace(table, rows=[row for row in table.rows if row.is_base or row.arm in arms])

    return replace(report, tables=list(map(kept, report.tables)), headline=report.headline and kept(report.headline))


def first_stage(store: Store, study: Study) -> Stage:
    """Returns the stage with which the page opens: `tune` if only trials of tuning are recorded, else `confirm`."""
    stages = {trial.stage for trial in store.trials(study.id)}
    return "tune" if stages == {"tune"} else "confirm"


def verdict(report: Report) -> None:
    """Draws the answer in one sentence, the number of arms with each verdict, and the failures."""
    st.subheader(plain(sentence(report)), anchor="answer")
    counts = {kind: n for kind, n in verdict_counts(report).items() if n}
    if counts:
        st.markdown(" \u2003 ".join(f"{MARKS[kind]} {n} {kind}" for kind, n in counts.items()))
    if report.failures:
        lines = failure_lines(report.failures)
        rest = [f"and {len(lines) - FAILURES} more"] if len(lines) > FAILURES else []
        with st.container(horizontal=True, vertical_alignment="center"):
            st.error(bullets([*lines[:FAILURES], *rest]))
            failed = {STUDY: st.query_params.get(STUDY, ""), "states": "failed"}
            st.page_link(
                "views/trials.py",
                label="Tracebacks",
                icon=":material/list:",
                width="content",
                query_params=failed,
            )


def at_a_glance(store: Store, study: Study, report: Report, arms: Collection[str]) -> None:
    """Draws the forest of the arms and tasks, and beside it the study's cost, doubts, and the next command."""
    left, right = st.columns([4, 1], gap="medium")
    shown = of_arms(report, arms)
    with left:
        if drawn := forest(shown):
            st.html(f"<style>{STYLE}</style>{drawn}")
            table_files(pivot(shown), f"{study.name} arms by tasks", LEGEND, caption=FOREST_LEGEND)
        else:
            table(pivot(shown), f"{study.name} arms by tasks", legend=LEGEND)
        if arms:
            st.caption("★ is the best of the arms shown. p and intervals are those of the test of all arms together.")
    with right:
        if hours := cost(store, study):
            st.markdown(f"**Cost**  \n{plain(hours)}")
        doubts = [*report.warnings, *dict.fromkeys(line for table in report.all_tables for line in table.warnings)]
        if doubts:
            with st.expander(f"{len(doubts)} doubt{'' if len(doubts) == 1 else 's'}", icon=":material/warning:"):
                st.markdown(bullets(doubts))
        st.markdown("**Next**")
        st.code(next_command(study, report), language=None, wrap_lines=True)


def cost(store: Store, study: Study) -> str:
    """Returns the hours of all trials of a study by kind of device, such as "1.2 GPU hours and 0.3 CPU hours"."""
    seconds = {"GPU": 0.0, "CPU": 0.0}
    for trial in {trial.key: trial for trial in store.trials(study.id)}.values():
        seconds["GPU" if trial.hardware.get("gpu") else "CPU"] += trial.seconds
    return " and ".join(f"{spent / 3600:.2g} {kind} hours" for kind, spent in seconds.items() if spent)


def next_command(study: Study, report: Report) -> str:
    """Returns the command that a reader of the answer is likely to run next.

    A study that has not ended goes on. The best arm of another one is exported, unless no arm is better and further
    seeds would decide one.
    """
    if report.state in ("interrupted", "incomplete", "failed"):
        return again(study, report) + (" --retry-failed" if report.state == "failed" else "")
    rows = [row for table in report.tables for row in table.rows]
    needed = [row.seeds_needed for row in rows if row.seeds_needed]
    if needed and not any(row.verdict == "better" for row in rows):
        return f"{again(study, report)} seeds={min(needed)}"
    name = f"{study.name}:{study.profile}" if study.profile else study.name
    return f"deltalab export {quote(name)} model --best"


def again(study: Study, report: Report) -> str:
    """Returns the command that ran a study, without its options of the machine and the ledger."""
    command = study.provenance.get("command", [])
    file = command[command.index("run") + 1] if "run" in command[:-1] else study.name
    words = [study.name if file.startswith("-") else file, *(["--profile", study.profile] if study.profile else [])]
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in report.overrides.items()}
    words += [f"{key}={text}" for key, text in texts.items()]
    return " ".join(["deltalab study run", *map(quote, words)])


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


def report_files(store: Store, study: Study, stage: Stage) -> None:
    """Draws buttons that download the report in the formats that `deltalab study report` writes.

    A file has the importances of a search, which this page does not show. They are found when somebody downloads it.
    """
    formats: dict[str, tuple[str, Callable[[Report], str]]] = {
        "CSV": ("csv", Report.to_csv),
        "Markdown": ("md", Report.to_markdown),
        "JSON": ("json", Report.to_json),
        "HTML": ("html", Report.to_html),
    }
    with st.container(horizontal=True):
        for name, (ending, written) in formats.items():
            st.download_button(
                f"Report as {name}",
                partial(report_file, store, study, stage, written),
                f"{study.name}.{ending}",
                icon=":material/download:",
                on_click="ignore",
            )


def report_file(store: Store, study: Study, stage: Stage, written: Callable[[Report], str]) -> str:
    """Returns the whole report as `written` writes it."""
    return written(cache.report_of(store, study, stage, importances=True))


def provenance(study: Study) -> None:
    """Draws the provenance of the study, such as its machine and versions, and the content of the study's file."""
    with st.expander("Provenance and settings"):
        # The command is left out, since it may contain a database's URL with a password.
        st.json({key: value for key, value in study.provenance.items() if key not in ("command", "earlier", "tasks")})
        st.json(study.spec, expanded=False)


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
