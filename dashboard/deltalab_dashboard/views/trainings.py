"""Trainings of exported folders: their figures, and their curves side by side, whatever study they come from."""

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store
from deltalab.store.trainings import TrainingRow, curves, measured, trainings
from deltalab.study.reports.report import TRAINING_HEADERS, training_cells
from deltalab_dashboard import colors, downloads
from deltalab_dashboard.frame import REFRESH_SECONDS, STUDY, ledger

POINTS = 500  # per training; a screen shows no more
AXES = {"tokens": "tokens", "steps": "step", "seconds of training": "seconds"}
FIRST = [("train", "loss"), ("validation", "loss")]
NOTHING_YET = """
A training of an exported folder appears here while it runs:

```bash
platform export STUDY exported --arm ARM --to torchtitan --scale 340M
platform train exported --data PACKED --db deltalab.db
```

`platform db import RUN` records one that ran on another machine.
"""


def page(store: Store) -> None:
    st.title("Trainings", anchor=False)
    rows = trainings(store)
    if not rows:
        st.markdown(NOTHING_YET)
        return
    labels = {row.id: label(row, rows) for row in rows}
    own = [labels[row.id] for row in _of_chosen_study(store, rows)]
    chosen = st.multiselect(
        "Trainings",
        list(labels.values()),
        placeholder="those of the chosen study",
        key="trainings",
        bind="query-params",
    )
    chosen = chosen or own or list(labels.values())
    shown_rows = [row for row in rows if labels[row.id] in chosen]
    table(shown_rows, labels)
    found = measured(store)
    if not found:
        st.info("Nothing is measured yet.")
        return
    names = {f"{name}, {split}": (split, name) for split, name in sorted(found, key=lambda f: (f not in FIRST, f))}
    columns = st.columns(2)
    metric = columns[0].selectbox("Metric", list(names), key="metric", bind="query-params")
    axis = columns[1].selectbox("Over", list(AXES), key="axis", bind="query-params")
    points = [
        {"training": labels[point.training], "step": point.step, "tokens": point.tokens, "seconds": point.seconds,
         "value": point.value}
        for point in curves(store, [row.id for row in shown_rows], *names[metric], max_points=POINTS)
        if point.seconds is not None or AXES[axis] != "seconds"
    ]  # fmt: skip
    if not points:
        st.info("These trainings have no such curve yet.")
        return
    frame = pd.DataFrame(points)
    about = f"{metric} of {len(shown_rows)} trainings over {axis}"
    drawn = chart(frame, list(labels.values()), AXES[axis], axis, metric)
    downloads.chart(drawn, "trainings curves", rows=frame, about=about, height=520)
    if AXES[axis] == "seconds":
        st.caption("The time of steps alone, by the measured tokens per second: without start, evaluations and stops.")


def label(row: TrainingRow, rows: list[TrainingRow]) -> str:
    """The arm, or the rule where there is none, and the training's name; where others have them too, also the start
    of its run's id."""
    names = [f"{other.arm or other.rule}, {other.name}" for other in rows]
    name = names[rows.index(row)]
    return name if names.count(name) == 1 else f"{name} {row.run[:8]}"


def table(rows: list[TrainingRow], labels: dict[int, str]) -> None:
    """The figures of trainings, and the study of each."""
    lines = []
    for row in rows:
        cells = dict(zip(TRAINING_HEADERS, training_cells(row), strict=True)) | {"training": labels[row.id]}
        lines.append({**cells, "study": row.study or ""})
    downloads.table(lines, "trainings")


def chart(
    points: pd.DataFrame, labels: list[str], field: str, axis: str, metric: str
) -> alt.LayerChart | alt.FacetChart:
    # All trainings of the ledger are the colours' domain: one keeps its colour when others are left out.
    own = colors.arms(labels, None, highlighted=list(points["training"].unique()))
    colored = alt.Scale(domain=list(own), range=list(own.values()))
    base = alt.Chart(points).encode(
        x=alt.X(f"{field}:Q", title=axis, axis=alt.Axis(tickCount=10, format="~s"), scale=alt.Scale(nice=False)),
        y=alt.Y("value:Q", title=metric, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=10)),
        color=alt.Color("training:N", scale=colored, sort=None, legend=alt.Legend(title=None, labelLimit=0)),
        tooltip=["training:N", "step:Q", "tokens:Q", "seconds:Q", alt.Tooltip("value:Q", format=".4f")],
    )
    return alt.layer(base.mark_line(strokeWidth=2, point=points["step"].nunique() == 1)).add_params(downloads.zoom())


def _of_chosen_study(store: Store, rows: list[TrainingRow]) -> list[TrainingRow]:
    chosen = st.session_state.get(STUDY)
    if chosen is None:
        return rows
    ids = {row.id for row in trainings(store, store.study(chosen))}
    return [row for row in rows if row.id in ids]


if __name__ == "__main__":  # how Streamlit runs a page
    st.fragment(page, run_every=10 * REFRESH_SECONDS)(ledger())
