"""Learning curves: a thin line for each seed, a thick one for the mean of a trial's seeds."""

import math
from typing import get_args

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab_dashboard.chosen import plain, show

POINTS = 500  # per seed; a screen shows no more
LEGEND_ROWS = 30  # as many as the chart is high


def page(store: Store, study: Study) -> None:
    st.title("Learning curves", anchor=False)
    columns = st.columns(4)
    stage: Stage = columns[0].selectbox("Stage", sorted(get_args(Stage)), key="stage", bind="query-params")
    recorded = sorted({(f.task, f.metric, f.split) for f in store.final_metrics(study.id, stage=stage)})
    if not recorded:
        st.info(f"Nothing is measured in the stage '{stage}' yet.")
        return
    tasks = [task for task in study.provenance["tasks"] if any(task == found[0] for found in recorded)]
    task = columns[1].selectbox("Task", tasks, key="task", bind="query-params")
    main = study.provenance["tasks"][task]["metric"]
    metrics = sorted({found[1] for found in recorded if found[0] == task}, key=lambda name: (name != main, name))
    metric = columns[2].selectbox("Metric", metrics, key="metric", bind="query-params")
    splits = sorted(
        {found[2] for found in recorded if found[:2] == (task, metric)},
        key=lambda name: (name == "test", name != "validation"),
    )
    split = columns[3].selectbox("Split", splits, key="split", bind="query-params")
    arms = [arm.name for arm in store.arms(study.id)]
    chosen = st.multiselect("Arms", arms, placeholder="all arms", key="arms", bind="query-params") or arms

    states = {(trial.key, seed): state for trial in store.trials(study.id) for seed, state in trial.runs.items()}
    points = [
        {**point._asdict(), "state": states[point.trial, point.seed]}
        for point in store.curves(study.id, task, metric, split, stage=stage, max_points=POINTS)
        if point.arm in chosen
    ]
    if not points:
        st.info("These arms have no such curve yet.")
        return
    st.altair_chart(chart(pd.DataFrame(points), arms, f"{task}: {metric} on {split}"), height=520)
    st.caption("A thin line is a seed. A thick one is a trial's mean over the seeds that finished.")
    diverged = sorted({(point["arm"], point["seed"]) for point in points if point["state"] == "diverged"})
    if diverged:
        listed = ", ".join(f"{arm} (seed {seed})" for arm, seed in diverged)
        st.caption(plain(f"Diverged, dashed up to where they did: {listed}."))
    if missing := [arm for arm in chosen if not any(point["arm"] == arm for point in points)]:
        st.caption(plain(f"No curve yet: {', '.join(missing)}."))


def chart(points: pd.DataFrame, arms: list[str], title: str) -> alt.LayerChart | alt.FacetChart:
    base = alt.Chart(points).encode(
        x=alt.X("step:Q", title="step", axis=alt.Axis(tickCount=10), scale=alt.Scale(nice=False)),
        # All arms of the study: an arm keeps its colour when others are left out.
        color=alt.Color(
            "arm:N",
            scale=alt.Scale(domain=arms),
            sort=None,
            legend=alt.Legend(
                title=None,
                labelLimit=0,
                symbolLimit=len(arms),  # every arm; Vega-Lite stops at 30
                columns=math.ceil(len(arms) / LEGEND_ROWS),
                symbolOpacity=1,
                symbolStrokeWidth=3,
            ),
        ),
    )
    dots = points["step"].nunique() == 1  # a line needs two points to be seen
    seeds = base.mark_line(strokeWidth=1, opacity=0.35, point=dots).encode(
        y=alt.Y("value:Q", title=title, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=10)),
        detail=["trial:N", "seed:N"],
        strokeDash=alt.StrokeDash(
            "state:N", scale=alt.Scale(domain=["done", "diverged"], range=[[1, 0], [4, 3]]), legend=None
        ),
        tooltip=["arm:N", "seed:N", "step:Q", alt.Tooltip("value:Q", format=".4f"), "state:N"],
    )
    means = (
        base.transform_filter(alt.datum.state == "done")
        .mark_line(strokeWidth=3)
        .encode(
            y="mean(value):Q", detail="trial:N", tooltip=["arm:N", "step:Q", alt.Tooltip("mean(value):Q", format=".4f")]
        )
    )
    return alt.layer(seeds, means).interactive()


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
