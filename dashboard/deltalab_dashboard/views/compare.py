"""The page Compare: the settings in which two studies or arms differ, and the verdicts and curves of two or more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.errors import InputError
from deltalab.statistics.intervals import mean_interval
from deltalab.store import Store, Study
from deltalab.store.studies import shelf
from deltalab.store.studies.shelf import ListedStudy
from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.answers.wording import format_metric
from deltalab.study.reports.columns import cells, columns, headers
from deltalab.study.reports.report import Report
from deltalab.study.reports.study_diff import SettingDiff, Side, StudyDiff, arm_diff, side_of_study, study_diff
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab.study.specs.setting_text import setting_text
from deltalab_dashboard import cache, colors, downloads
from deltalab_dashboard.charts.legend import Lines, beside_legends, legend_columns
from deltalab_dashboard.charts.task_table import verdict_text
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.text import badge, label, plain

# The most points that are read of a seed's curve.
POINTS = 200
# The most arms whose curves are drawn before the reader picks arms.
ARMS = 5
# The height of the lines in pixels, without their legends.
HEIGHT = 320
# The dashes of the sides' lines, in order.
DASHES = ([1, 0], [6, 4], [2, 3], [10, 3, 2, 3], [12, 4], [4, 2, 1, 2])
STUDIES_OR_ARMS = ["studies", "arms"]
NOTHING_YET = "Two studies, or two arms of one study, can be compared: there is no study yet."


@dataclass(frozen=True)
class Choice:
    """One of the sides that are compared: a study, or an arm of a study.

    Attributes:
        study: The study.
        side: The settings of the study, and facts such as its label.
        report: The study's report. Of two arms of one study, it compares all arms with that on the left.
        arm: The arm that is compared. None if the whole study is compared.
    """

    study: Study
    side: Side
    report: Report
    arm: str | None

    @property
    def name(self) -> str:
        """The name on the page. It contains the study's id, since a study that ran twice has two ids."""
        name = f"{self.side.label} (id {self.study.id})"
        return f"{self.arm} of {name}" if self.arm else name

    @property
    def base(self) -> str:
        """The name of the study's base."""
        return next(row.arm for row in self.report.tables[0].rows if row.is_base)

    def table(self, task: str) -> TaskTable:
        """Returns the report's table of the arms on a task."""
        return next(table for table in self.report.all_tables if table.task == task)

    def row(self, task: str, arm: str) -> Row | None:
        """Returns the row of an arm on a task, or None if the study does not have the arm."""
        return next((row for row in self.table(task).rows if row.arm == arm), None)


def page(store: Store) -> None:
    """Draws the page."""
    st.title("Compare", anchor=False)
    studies = shelf.listed(store)
    if not studies:
        st.info(NOTHING_YET)
        return
    head = st.columns([5, 1], vertical_alignment="bottom")
    kind = head[0].radio("Compare", STUDIES_OR_ARMS, horizontal=True, key="what", bind="query-params")
    # Streamlit forgets the address of a switch that moves on the page: this one stands above all that comes and goes.
    bands = head[1].toggle("Bands", False, key="bands", bind="query-params", help="The interval of each curve's mean.")
    columns = st.columns(2)
    labels = {label(row): row for row in studies if not row.hidden or row.id == st.session_state.get(STUDY)}
    first = next((text for text, row in labels.items() if row.id == st.session_state.get(STUDY)), next(iter(labels)))
    with columns[0]:
        left = choose(store, labels, "left", first, of_arms=kind == "arms", other=None)
    with columns[1]:
        right = choose(store, labels, "right", _partner(labels, first), of_arms=kind == "arms", other=left)
    if (left.study.id, left.arm) == (right.study.id, right.arm):
        st.info("Both are the same: choose another study or another arm.")
        return
    if left.arm and left.study.id == right.study.id:
        both = cache.report_of(store, left.study, against=left.arm)
        left, right = replace(left, report=both), replace(right, report=both)
    diff = study_diff(left.side, right.side)
    identity(diff, left, right)
    settings(diff, left, right)
    sides = [left, right, *(further(store, labels, left, right) if kind == "studies" else [])]
    # The means over tasks of studies can be set side by side only if they are over the same tasks.
    of_others = [{(table.task, *table.over) for table in side.report.all_tables} for side in sides[1:]]
    tasks = [table.task for table in left.report.all_tables if all((table.task, *table.over) in of for of in of_others)]
    if not tasks:
        st.info("They have no task in common, so there are no verdicts and curves side by side.")
        return
    verdicts(tasks, sides)
    curves(store, tasks, sides, bands=bands)


def further(store: Store, labels: dict[str, ListedStudy], left: Choice, right: Choice) -> list[Choice]:
    """Draws the choice of studies beside the two, whose verdicts and curves are shown, too."""
    offered = [text for text, row in labels.items() if row.id not in (left.study.id, right.study.id)]
    picked = st.multiselect(
        "Further studies, for verdicts and curves",
        offered,
        placeholder="none",
        key="further",
        bind="query-params",
        max_selections=len(DASHES) - 2,
    )
    studies = [store.study(labels[text].id) for text in picked]
    return [
        Choice(study, side_of_study(study, store.arms(study.id)), cache.report_of(store, study), None)
        for study in studies
    ]


def choose(
    store: Store, labels: dict[str, ListedStudy], key: str, default: str, *, of_arms: bool, other: Choice | None
) -> Choice:
    """Draws the choice of a study, and of one of its arms if `of_arms`.

    Args:
        store: The ledger.
        labels: The studies to choose from: label -> study.
        key: The side, "left" or "right".
        default: The label of the study that is chosen at first.
        of_arms: Whether the reader also chooses an arm of the study.
        other: The choice on the left side. None if the left side is the one to choose.
    """
    names = list(labels)
    text = st.selectbox(key.capitalize(), names, index=names.index(default), key=key, bind="query-params")
    study = store.study(labels[text].id)
    arms = store.arms(study.id)
    arm = None
    if of_arms:
        offered = [arm.name for arm in arms]
        if other is not None and other.study.id == study.id:
            at = next((i for i, name in enumerate(offered) if name != other.arm), 0)
        else:
            at = offered.index(other.arm) if other is not None and other.arm in offered else 0
        arm = st.selectbox(f"Arm on the {key}", offered, index=at, key=f"{key}_arm", bind="query-params")
    st.markdown(f"{badge(study)} begun {study.created_at:%Y-%m-%d %H:%M} UTC")
    return Choice(study, side_of_study(study, arms), cache.report_of(store, study), arm)


def identity(diff: StudyDiff, left: Choice, right: Choice) -> None:
    """Draws whether two studies compute the same, and which machines, versions or commits differ."""
    if left.study.id == right.study.id:
        return
    st.subheader("What they compute", anchor="identity")
    if diff.identity:
        difference_table(diff.identity, left, right, "identity")
    else:
        st.markdown("Profile, tasks, sources of rules and arithmetic are the same.")
    if diff.ran:
        with st.expander(f"They ran with other machines, versions or commits: {len(diff.ran)} differences"):
            difference_table(diff.ran, left, right, "ran with")


def settings(diff: StudyDiff, left: Choice, right: Choice) -> None:
    """Draws the settings that differ between the sides.

    If whole studies are compared, the arms that only one of them has are drawn, too.
    """
    st.subheader("Settings that differ", anchor="settings")
    if left.arm and right.arm:
        rows = arm_diff(left.side.arms[left.arm], right.side.arms[right.arm])
    else:
        rows = [*diff.settings, *diff.arms]
    if rows:
        difference_table(rows, left, right, "settings")
    else:
        st.markdown("All settings of what both have are the same.")
    if not left.arm:
        for choice, arms in ((left, diff.only_left), (right, diff.only_right)):
            if arms:
                st.markdown(plain(f"Only {choice.name} has the arms {', '.join(arms)}."))


def difference_table(rows: Sequence[SettingDiff], left: Choice, right: Choice, name: str) -> None:
    """Draws a table of settings that differ. `name` ends the names of the downloaded files."""
    lines = [
        {
            "setting": row.key,
            left.name: setting_text(row.left),
            right.name: setting_text(row.right),
            "where": ", ".join(row.where),
        }
        for row in rows
    ]
    if not any(line["where"] for line in lines):
        lines = [{key: cell for key, cell in line.items() if key != "where"} for line in lines]
    downloads.table(lines, f"{left.study.name} {right.study.name} {name}")


def verdicts(tasks: Sequence[str], sides: Sequence[Choice]) -> None:
    """Draws the figures and verdicts of the sides on each task."""
    left, right = sides[:2]
    st.subheader("Verdicts", anchor="verdicts")
    if left.study.id != right.study.id:
        st.caption("Each verdict is against the base of its own study. The studies are not tested against each other.")
    elif left.arm:
        planned = left.report.warnings[:1] if left.report.against else []
        st.caption(plain(" ".join([f"Differences, p and verdicts are against {left.arm}.", *planned])))
    for task in tasks:
        name = f"{left.study.name} {right.study.name} {task} verdicts"
        rows = figure_rows(task, left, right) if left.arm and right.arm else arm_rows(task, sides)
        st.markdown(f"**{plain(task)}**")
        downloads.table(list(rows), name)


def figure_rows(task: str, left: Choice, right: Choice) -> Iterator[dict[str, str]]:
    """Yields a row for each figure that one of the two arms has, with the values of both arms."""
    both = []
    for choice in (left, right):
        assert choice.arm is not None
        row = choice.row(task, choice.arm)
        table = choice.table(task)
        figures = dict(zip(headers(table), cells(row, columns(table)), strict=True)) if row else {}
        figures |= {"verdict": verdict_text(row)} if row else {}
        more = {f"{name} (not tested)": format_metric(mean) for name, mean in row.metrics.items()} if row else {}
        both.append(figures | more)
    for name in dict.fromkeys([*both[0], *both[1]]):
        if name != "arm" and any(figures.get(name) for figures in both):
            yield {"figure": name, left.name: both[0].get(name, ""), right.name: both[1].get(name, "")}


def arm_rows(task: str, sides: Sequence[Choice]) -> Iterator[dict[str, str]]:
    """Yields a row for each arm in each study that has it. The rows of an arm stand together."""
    lines: dict[str, list[dict[str, str]]] = {}
    for choice in sides:
        table = choice.table(task)
        for row in table.rows:
            figures = dict(zip(headers(table), cells(row, columns(table)), strict=True))
            figures["verdict"] = verdict_text(row)
            shown = {name: figures[name] for name in (table.metric, "difference", "verdict")}
            lines.setdefault(row.arm, []).append({"arm": row.arm, "id": str(choice.study.id), **shown})
    together = [line for of_arm in lines.values() for line in of_arm]
    names = list(dict.fromkeys(name for line in together for name in line))
    for line in together:
        yield {name: line.get(name, "") for name in names}


def curves(store: Store, tasks: Sequence[str], sides: Sequence[Choice], *, bands: bool) -> None:
    """Draws the curves of the sides for a metric that was measured on all of them, with bands or without."""
    st.subheader("Curves", anchor="curves")
    left = sides[0]
    of_sides = [
        {(task, metric, split) for stage, task, split, metric in store.measured(side.study.id) if stage == "confirm"}
        for side in sides
    ]
    measured = sorted(set.intersection(*of_sides))
    tasks = [task for task in tasks if any(task == measured_task for measured_task, *_ in measured)]
    if not tasks:
        st.info("They have no metric in common yet.")
        return
    columns = st.columns(3)
    task = columns[0].selectbox("Task", tasks, key="task", bind="query-params")
    judged = left.table(task).metric
    names = {name for of_task, name, _ in measured if of_task == task}
    metrics = sorted(names, key=lambda name: (name != judged, name))
    metric = columns[1].selectbox("Metric", metrics, key="metric", bind="query-params")
    names = {name for of_task, of_metric, name in measured if (of_task, of_metric) == (task, metric)}
    splits = sorted(names, key=lambda name: (name != "validation", name))
    split = columns[2].selectbox("Split", splits, key="split", bind="query-params")
    if left.arm:
        lines = [(side, [side.arm] if side.arm else []) for side in sides]
    else:
        arms = list(dict.fromkeys([left.base, *(arm for side in sides for arm in side.side.arms)]))
        common = [arm for arm in arms if all(arm in side.side.arms for side in sides)]
        picked = st.multiselect(
            "Arms", arms, placeholder=f"the base and {ARMS - 1} more that all have", key="arms", bind="query-params"
        )
        lines = [(side, picked or common[:ARMS]) for side in sides]
    points = pd.DataFrame(
        [point for choice, arms in lines for point in mean_curves(store, choice, arms, task, metric, split)],
        columns=["which", "arm", "step", "mean", "low", "high", "seeds"],
    )
    if points.empty:
        st.info("These arms have no such curve yet.")
        return
    title = f"{task}: {metric} on {split}"
    description = f"{title}, by step, of {' and '.join(side.name for side in sides)}"
    name = f"{' '.join(side.study.name for side in sides)} curves"
    figure = overlay(points, sides, title, bands=bands)
    downloads.chart(figure, name, rows=points, description=description)
    band = "; a band is its 95% interval" if bands else ""
    st.caption(f"A line is the mean over seeds of an arm's tuned candidate{band}.")


def mean_curves(
    store: Store, choice: Choice, arms: Sequence[str], task: str, metric: str, split: str
) -> Iterator[dict[str, object]]:
    """Yields the points of each arm's curve.

    A point is the mean over the seeds of the arm's tuned candidate at one step, with the interval of the mean.
    """
    tuned = {arm: row.tuned for arm in arms if (row := choice.row(task, arm)) is not None}
    keys = {
        (trial.arm, trial.key)
        for trial in store.trials(choice.study.id)
        if trial.task == task and trial.stage == "confirm" and trial.values == tuned.get(trial.arm)
    }
    trials = [key for _, key in keys]
    judged = recorded_tasks(choice.study)[task]
    bounds = judged.bounds if metric == judged.metric else None
    values: dict[tuple[str, int], list[float]] = {}
    for point in store.curves(choice.study.id, task, metric, split, max_points=POINTS, trials=trials):
        if (point.arm, point.trial) in keys:
            values.setdefault((point.arm, point.step), []).append(point.value)
    for (arm, step), of_seeds in values.items():
        interval = mean_interval(of_seeds, bounds)
        yield {
            "which": choice.name,
            "arm": arm,
            "step": step,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "seeds": len(of_seeds),
        }


def overlay(points: pd.DataFrame, sides: Sequence[Choice], title: str, *, bands: bool) -> Lines:
    """Draws a line for each arm on each side, with a band if `bands`.

    Dashes tell the sides apart. Colours tell the arms of studies apart, or the sides if single arms are compared.
    """
    names = [side.name for side in sides]
    if sides[0].arm:
        color = alt.Color("which:N", scale=alt.Scale(domain=names, range=[colors.BETTER, colors.WORSE]), sort=None)
        legend = names
    else:
        arms = list(dict.fromkeys(arm for side in sides for arm in side.side.arms))
        color_of = colors.arm_colors(arms, sides[0].base, highlighted=list(points["arm"].unique()))
        drawn = [arm for arm in arms if arm in set(points["arm"])]
        color = alt.Color("arm:N", scale=alt.Scale(domain=drawn, range=[color_of[arm] for arm in drawn]), sort=None)
        legend = drawn
    base = alt.Chart(points).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickCount=10), scale=alt.Scale(nice=False)),
        color=color.legend(orient="bottom", title=None, labelLimit=0, columns=legend_columns(legend)),
        detail=["which:N", "arm:N"],
    )
    band = base.mark_area(opacity=0.15).encode(
        y=alt.Y("low:Q", title=title, scale=alt.Scale(zero=False)), y2="high:Q", tooltip=alt.value(None)
    )
    dash = alt.Scale(domain=names, range=list(DASHES[: len(names)]))
    line = base.mark_line(strokeWidth=2.5, point=points["step"].nunique() == 1).encode(
        y=alt.Y("mean:Q", title=title, scale=alt.Scale(zero=False)),
        strokeDash=alt.StrokeDash(
            # Above the chart: two legends side by side would be wider than a phone.
            "which:N",
            scale=dash,
            sort=None,
            legend=alt.Legend(orient="top", title=None, labelLimit=0, columns=1),
        ),
        tooltip=[
            "which:N",
            "arm:N",
            "step:Q",
            "seeds:Q",
            *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("mean", "low", "high")),
        ],
    )
    return beside_legends(alt.layer(*([band] if bands else []), line), HEIGHT)


def _partner(labels: dict[str, ListedStudy], first: str) -> str:
    """Returns the label of the study that is at first compared with the study `first`.

    It is the latest other study of the same name, or else the latest other study. If there is no other study, it is
    `first`.
    """
    others = [text for text in labels if text != first]
    same = [text for text in others if labels[text].name == labels[first].name]
    return next(iter(same or others), first)


if __name__ == "__main__":  # Streamlit runs a page as a script.
    try:
        page(ledger())
    except InputError as error:
        st.error(plain(str(error)))
