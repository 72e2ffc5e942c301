"""The page Trainings: the figures and curves of trainings of exported folders. It can show trainings of all studies."""

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store
from deltalab.store.trainings import TrainingRow, curves, measured, trainings
from deltalab.study.reports.lines import (
    COMPARISON_HEADERS,
    COMPARISON_NOTE,
    COMPARISONS,
    TRAINING_HEADERS,
    comparison_cells,
    training_cells,
)
from deltalab_dashboard import colors, downloads
from deltalab_dashboard.frame import REFRESH_SECONDS, STUDY, ledger

# The most points that are read of a training's curve. A screen shows no more.
POINTS = 500
AXES = {"tokens": "tokens", "steps": "step", "seconds of training": "seconds"}
# The choices of a metric that are listed first, each as (split, metric).
FIRST = [("train", "loss"), ("validation", "loss")]
NOTHING_YET = """
A training of an exported folder appears here while it runs:

```bash
deltalab export STUDY exported --arm ARM --to torchtitan --scale 340M
deltalab train exported --data PACKED --db deltalab.db
```

`deltalab db import RUN` records one that ran on another machine.
"""


def page(store: Store) -> None:
    """Draws the page."""
    st.title("Trainings", anchor=False)
    rows = trainings(store)
    if not rows:
        st.markdown(NOTHING_YET)
        return
    labels = {row.id: training_label(row, rows) for row in rows}
    of_study = [labels[row.id] for row in _of_chosen_study(store, rows)]
    picked = st.multiselect(
        "Trainings",
        list(labels.values()),
        placeholder="those of the chosen study",
        key="trainings",
        bind="query-params",
    )
    picked = picked or of_study or list(labels.values())
    picked_rows = [row for row in rows if labels[row.id] in picked]
    training_table(picked_rows, labels)
    comparison_table(picked_rows, labels)
    metrics = sorted(measured(store), key=lambda split_and_name: (split_and_name not in FIRST, split_and_name))
    if not metrics:
        st.info("Nothing is measured yet.")
        return
    names = {f"{name}, {split}": (split, name) for split, name in metrics}
    columns = st.columns(2)
    metric = columns[0].selectbox("Metric", list(names), key="metric", bind="query-params")
    axis = columns[1].selectbox("Over", list(AXES), key="axis", bind="query-params")
    points = [
        {"training": labels[point.training], "step": point.step, "tokens": point.tokens, "seconds": point.seconds,
         "value": point.value}
        for point in curves(store, [row.id for row in picked_rows], *names[metric], max_points=POINTS)
        if point.seconds is not None or AXES[axis] != "seconds"
    ]  # fmt: skip
    if not points:
        st.info("These trainings have no such curve yet.")
        return
    frame = pd.DataFrame(points)
    description = f"{metric} of {len(picked_rows)} trainings over {axis}"
    figure = training_chart(frame, list(labels.values()), AXES[axis], axis, metric)
    downloads.chart(figure, "trainings curves", rows=frame, description=description, height=520)
    if AXES[axis] == "seconds":
        st.caption("The time of steps alone, by the measured tokens per second: without start, evaluations and stops.")


def training_label(row: TrainingRow, rows: list[TrainingRow]) -> str:
    """Returns the label of a training: its arm or rule, and its name.

    If another training has the same label, the beginning of the run's id is added.
    """
    names = [f"{other.arm or other.rule}, {other.name}" for other in rows]
    name = names[rows.index(row)]
    return name if names.count(name) == 1 else f"{name} {row.run[:8]}"


def training_table(rows: list[TrainingRow], labels: dict[int, str]) -> None:
    """Draws a table with the figures and the study of each training."""
    lines = []
    for row in rows:
        cells = dict(zip(TRAINING_HEADERS, training_cells(row), strict=True)) | {"training": labels[row.id]}
        lines.append({**cells, "study": row.study or ""})
    downloads.table(lines, "trainings")


def comparison_table(rows: list[TrainingRow], labels: dict[int, str]) -> None:
    """Draws a table with the differences of trainings to other models, if there are any."""
    lines = [
        dict(zip(COMPARISON_HEADERS, cells, strict=True)) | {"training": labels[row.id]}
        for row in rows
        for cells in comparison_cells([row])
    ]
    if lines:
        st.subheader(COMPARISONS, anchor=False)
        downloads.table(lines, "comparisons")
        st.caption(COMPARISON_NOTE)


def training_chart(
    points: pd.DataFrame, labels: list[str], field: str, axis: str, metric: str
) -> alt.LayerChart | alt.FacetChart:
    """Draws a line for each training.

    Args:
        points: A row for each point, with the columns `training`, `step`, `tokens`, `seconds` and `value`.
        labels: The labels of all trainings in the ledger. A training keeps its colour only if trainings that the chart
            leaves out are listed, too.
        field: The column of `points` on the horizontal axis.
        axis: The title of the horizontal axis.
        metric: The title of the vertical axis.
    """
    color_of = colors.arm_colors(labels, None, highlighted=list(points["training"].unique()))
    scale = alt.Scale(domain=list(color_of), range=list(color_of.values()))
    base = alt.Chart(points).encode(
        x=alt.X(f"{field}:Q", title=axis, axis=alt.Axis(tickCount=10, format="~s"), scale=alt.Scale(nice=False)),
        y=alt.Y("value:Q", title=metric, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=10)),
        color=alt.Color("training:N", scale=scale, sort=None, legend=alt.Legend(title=None, labelLimit=0)),
        tooltip=["training:N", "step:Q", "tokens:Q", "seconds:Q", alt.Tooltip("value:Q", format=".4f")],
    )
    return alt.layer(base.mark_line(strokeWidth=2, point=points["step"].nunique() == 1)).add_params(downloads.zoom())


def _of_chosen_study(store: Store, rows: list[TrainingRow]) -> list[TrainingRow]:
    """Returns the trainings of the chosen study, or all trainings if the ledger has no study."""
    study_id = st.session_state.get(STUDY)
    if study_id is None:
        return rows
    ids = {row.id for row in trainings(store, store.study(study_id))}
    return [row for row in rows if row.id in ids]


if __name__ == "__main__":  # Streamlit runs a page as a script.
    st.fragment(page, run_every=10 * REFRESH_SECONDS)(ledger())
