"""Two studies, or two arms, side by side: what differs in their settings, their verdicts, and their curves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.errors import InputError
from deltalab.store import Store, Study, shelf
from deltalab.store.shelf import Listed
from deltalab.study.answers.answer import Row, TaskTable
from deltalab.study.reports.report import Report, cells, headers
from deltalab.study.reports.study_diff import Changed, Side, StudyDiff, arm_diff, of_ledger, study_diff, written
from deltalab.study.statistics.intervals import mean_interval
from deltalab_dashboard import cache, colors, downloads
from deltalab_dashboard.frame import STUDY, ledger
from deltalab_dashboard.text import badge, label, plain

POINTS = 200  # per seed: a chart of two studies is as wide as one of one
ARMS = 5  # drawn at first
STUDIES_OR_ARMS = ["studies", "arms"]
NOTHING_YET = "Two studies, or two arms of one study, can be compared: there is no study yet."


@dataclass(frozen=True)
class Compared:
    """One of the two: a study with its answer, and the arm that is meant, None for all."""

    study: Study
    side: Side
    found: Report
    arm: str | None

    @property
    def name(self) -> str:
        """What the page calls it. The id tells two runs of one study apart."""
        name = f"{self.side.label} (id {self.study.id})"
        return f"{self.arm} of {name}" if self.arm else name

    @property
    def base(self) -> str:
        return next(row.arm for row in self.found.tables[0].rows if row.is_base)

    def table(self, task: str) -> TaskTable:
        return next(table for table in self.found.tables if table.task == task)

    def row(self, task: str, arm: str) -> Row | None:
        return next((row for row in self.table(task).rows if row.arm == arm), None)


def page(store: Store) -> None:
    st.title("Compare", anchor=False)
    studies = shelf.listed(store)
    if not studies:
        st.info(NOTHING_YET)
        return
    what = st.radio("Compare", STUDIES_OR_ARMS, horizontal=True, key="what", bind="query-params")
    columns = st.columns(2)
    labels = {label(row): row for row in studies if not row.hidden or row.id == st.session_state.get(STUDY)}
    first = next((text for text, row in labels.items() if row.id == st.session_state.get(STUDY)), next(iter(labels)))
    with columns[0]:
        left = one(store, labels, "left", first, of_arms=what == "arms", other=None)
    with columns[1]:
        right = one(store, labels, "right", _partner(labels, first), of_arms=what == "arms", other=left)
    if (left.study.id, left.arm) == (right.study.id, right.arm):
        st.info("Both are the same: choose another study or another arm.")
        return
    diff = study_diff(left.side, right.side)
    identity(diff, left, right)
    configuration(diff, left, right)
    tasks = [table.task for table in left.found.tables if any(table.task == t.task for t in right.found.tables)]
    if not tasks:
        st.info("The two have no task in common, so there are no verdicts and curves side by side.")
        return
    verdicts(tasks, left, right)
    curves(store, tasks, left, right)


def one(
    store: Store, labels: dict[str, Listed], key: str, default: str, *, of_arms: bool, other: Compared | None
) -> Compared:
    """Lets one choose a study, and an arm of it. other: what was chosen on the left."""
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
    return Compared(study, of_ledger(study, arms), cache.found(store, study), arm)


def identity(diff: StudyDiff, left: Compared, right: Compared) -> None:
    """Says whether the two compute the same, and what they ran with."""
    if left.study.id == right.study.id:
        return
    st.subheader("What they compute", anchor="identity")
    if diff.identity:
        differences(diff.identity, left, right, "identity")
    else:
        st.markdown("Profile, tasks, sources of rules and arithmetic are the same.")
    if diff.ran:
        with st.expander(f"They ran with other machines, versions or commits: {len(diff.ran)} differences"):
            differences(diff.ran, left, right, "ran with")


def configuration(diff: StudyDiff, left: Compared, right: Compared) -> None:
    st.subheader("Settings that differ", anchor="settings")
    if left.arm and right.arm:
        rows = arm_diff(left.side.arms[left.arm], right.side.arms[right.arm])
    else:
        rows = [*diff.settings, *diff.arms]
    if rows:
        differences(rows, left, right, "settings")
    else:
        st.markdown("All settings of what both have are the same.")
    if not left.arm:
        for which, only in ((left, diff.only_left), (right, diff.only_right)):
            if only:
                st.markdown(plain(f"Only {which.name} has the arms {', '.join(only)}."))


def differences(rows: Sequence[Changed], left: Compared, right: Compared, name: str) -> None:
    lines = [
        {
            "setting": row.key,
            left.name: written(row.left),
            right.name: written(row.right),
            "where": ", ".join(row.where),
        }
        for row in rows
    ]
    if not any(line["where"] for line in lines):
        lines = [{key: cell for key, cell in line.items() if key != "where"} for line in lines]
    downloads.table(lines, f"{left.study.name} {right.study.name} {name}")


def verdicts(tasks: Sequence[str], left: Compared, right: Compared) -> None:
    st.subheader("Verdicts", anchor="verdicts")
    if left.study.id != right.study.id:
        st.caption(
            "Each verdict is against the base of its own study. The two studies are not tested against each other."
        )
    for task in tasks:
        name = f"{left.study.name} {right.study.name} {task} verdicts"
        side_by_side = figures if left.arm and right.arm else arms_of_both
        st.markdown(f"**{plain(task)}**")
        downloads.table(list(side_by_side(task, left, right)), name)


def figures(task: str, left: Compared, right: Compared) -> Iterator[dict[str, str]]:
    """A row for each figure of two arms."""
    both = []
    for which in (left, right):
        assert which.arm is not None
        row = which.row(task, which.arm)
        table = which.table(task)
        both.append(dict(zip(headers(table), cells(row), strict=True)) if row else {})
    for name in dict.fromkeys([*both[0], *both[1]]):
        if name != "arm" and any(found.get(name) for found in both):
            yield {"figure": name, left.name: both[0].get(name, ""), right.name: both[1].get(name, "")}


def arms_of_both(task: str, left: Compared, right: Compared) -> Iterator[dict[str, str]]:
    """A row for each arm that one of two studies has, with its figures in both."""
    found: dict[str, dict[str, str]] = {}
    for which in (left, right):
        table = which.table(task)
        wanted = [table.metric, "difference", "verdict"]
        for row in table.rows:
            figures = dict(zip(headers(table), cells(row), strict=True))
            line = found.setdefault(row.arm, {"arm": row.arm})
            line |= {f"{name}, id {which.study.id}": figures[name] for name in wanted}
    names = list(dict.fromkeys(name for line in found.values() for name in line))
    for line in found.values():
        yield {name: line.get(name, "") for name in names}


def curves(store: Store, tasks: Sequence[str], left: Compared, right: Compared) -> None:
    st.subheader("Curves", anchor="curves")
    had = [
        {(final.task, final.metric, final.split) for final in store.final_metrics(which.study.id, stage="confirm")}
        for which in (left, right)
    ]
    both = sorted(had[0] & had[1])
    tasks = [task for task in tasks if any(task == found[0] for found in both)]
    if not tasks:
        st.info("The two have no metric in common yet.")
        return
    columns = st.columns(3)
    task = columns[0].selectbox("Task", tasks, key="task", bind="query-params")
    own = left.table(task).metric
    metrics = sorted({found[1] for found in both if found[0] == task}, key=lambda name: (name != own, name))
    metric = columns[1].selectbox("Metric", metrics, key="metric", bind="query-params")
    splits = sorted(
        {found[2] for found in both if found[:2] == (task, metric)}, key=lambda one: (one != "validation", one)
    )
    split = columns[2].selectbox("Split", splits, key="split", bind="query-params")
    if left.arm and right.arm:
        drawn = [(left, [left.arm]), (right, [right.arm])]
    else:
        arms = list(dict.fromkeys([left.base, *left.side.arms, *right.side.arms]))
        common = [arm for arm in arms if arm in left.side.arms and arm in right.side.arms]
        picked = st.multiselect(
            "Arms", arms, placeholder=f"the base and {ARMS - 1} more that both have", key="arms", bind="query-params"
        )
        drawn = [(left, picked or common[:ARMS]), (right, picked or common[:ARMS])]
    points = pd.DataFrame(
        [line for which, arms in drawn for line in means(store, which, arms, task, metric, split)],
        columns=["which", "arm", "step", "mean", "low", "high", "seeds"],
    )
    if points.empty:
        st.info("These arms have no such curve yet.")
        return
    title = f"{task}: {metric} on {split}"
    about = f"{title}, by step, of {left.name} and {right.name}"
    name = f"{left.study.name} {right.study.name} curves"
    downloads.chart(overlaid(points, left, right, title), name, rows=points, about=about, height=460)
    st.caption("A line is the mean over seeds of an arm's tuned candidate; a band is its 95% interval.")


def means(
    store: Store, which: Compared, arms: Sequence[str], task: str, metric: str, split: str
) -> Iterator[dict[str, object]]:
    """The mean over seeds and its interval at each step, of each arm's tuned candidate."""
    tuned = {arm: row.tuned for arm in arms if (row := which.row(task, arm)) is not None}
    keys = {
        (trial.arm, trial.key)
        for trial in store.trials(which.study.id)
        if trial.task == task and trial.stage == "confirm" and trial.values == tuned.get(trial.arm)
    }
    trials = [key for _, key in keys]
    values: dict[tuple[str, int], list[float]] = {}
    for point in store.curves(which.study.id, task, metric, split, max_points=POINTS, trials=trials):
        if (point.arm, point.trial) in keys:
            values.setdefault((point.arm, point.step), []).append(point.value)
    for (arm, step), found in values.items():
        interval = mean_interval(found)
        yield {
            "which": which.name,
            "arm": arm,
            "step": step,
            "mean": interval.mean,
            "low": interval.low,
            "high": interval.high,
            "seeds": len(found),
        }


def overlaid(points: pd.DataFrame, left: Compared, right: Compared, title: str) -> alt.LayerChart | alt.FacetChart:
    """Lines with bands: the two are told apart by dashes, and arms of two studies by colours."""
    names = [left.name, right.name]
    if left.arm and right.arm:
        color = alt.Color("which:N", scale=alt.Scale(domain=names, range=[colors.BETTER, colors.WORSE]), sort=None)
    else:
        arms = list(dict.fromkeys([*left.side.arms, *right.side.arms]))
        own = colors.arms(arms, left.base, highlighted=list(points["arm"].unique()))
        drawn = [arm for arm in arms if arm in set(points["arm"])]
        color = alt.Color("arm:N", scale=alt.Scale(domain=drawn, range=[own[arm] for arm in drawn]), sort=None)
    base = alt.Chart(points).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickCount=10), scale=alt.Scale(nice=False)),
        color=color.legend(orient="bottom", title=None, labelLimit=0, columns=4),
        detail=["which:N", "arm:N"],
    )
    band = base.mark_area(opacity=0.15).encode(
        y=alt.Y("low:Q", title=title, scale=alt.Scale(zero=False)), y2="high:Q", tooltip=alt.value(None)
    )
    dash = alt.Scale(domain=names, range=[[1, 0], [6, 4]])
    line = base.mark_line(strokeWidth=2.5, point=points["step"].nunique() == 1).encode(
        y="mean:Q",
        strokeDash=alt.StrokeDash(
            "which:N", scale=dash, sort=None, legend=alt.Legend(orient="bottom", title=None, labelLimit=0, columns=1)
        ),
        tooltip=[
            "which:N",
            "arm:N",
            "step:Q",
            "seeds:Q",
            *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("mean", "low", "high")),
        ],
    )
    return alt.layer(band, line)


def _partner(labels: dict[str, Listed], first: str) -> str:
    """The study to compare with at first: the latest of the same name, else the latest other one."""
    others = [text for text in labels if text != first]
    same = [text for text in others if labels[text].name == labels[first].name]
    return next(iter(same or others), first)


if __name__ == "__main__":  # how Streamlit runs a page
    try:
        page(ledger())
    except InputError as error:
        st.error(plain(str(error)))
