"""Learning curves: the mean of each arm with its interval over steps, tokens, time or operations; and over length."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab_dashboard import colors, downloads
from deltalab_dashboard.charts.curve_lines import AXES, Chosen, Task, frame, length_of, lengths, means
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import plain

POINTS = 500  # of a line; a screen shows no more
ROWS = 20_000  # of a chart; a browser takes seconds for more
BEST = 5  # arms beside the base that are drawn at first
FEW = 10  # arms that each have a colour
SWITCH = "clicked"  # the selection that a click in the legend makes; "switch" is a reserved word of Vega
RUNS: dict[Stage, str] = {
    "confirm": "the run that each seed chose on validation, as in the report",
    "tune": "the runs of each arm's best candidate on validation, which is optimistic",
}


def page(store: Store, study: Study) -> None:
    st.title("Learning curves", anchor=False)
    columns = st.columns(4)
    measured = store.measured(study.id)
    stage: Stage = columns[0].selectbox("Stage", sorted(get_args(Stage)), key="stage", bind="query-params")
    recorded = {(task, metric, split) for its, task, split, metric in measured if its == stage}
    if not recorded:
        st.info(f"Nothing is measured in the stage '{stage}' yet.")
        return
    tasks = [task for task in study.provenance["tasks"] if any(task == found[0] for found in recorded)]
    name = columns[1].selectbox("Task", tasks, key="task", bind="query-params")
    main = study.provenance["tasks"][name]["metric"]
    metrics = sorted({found[1] for found in recorded if found[0] == name}, key=lambda one: (one != main, one))
    metric = columns[2].selectbox("Metric", metrics, key="metric", bind="query-params")
    splits = sorted(
        {found[2] for found in recorded if found[:2] == (name, metric)},
        key=lambda one: (one != "validation", one != "train", one != "test"),
    )
    split = columns[3].selectbox("Split", splits, key="split", bind="query-params")
    axis, smoothing, scales, drawn = options()

    arms = store.arms(study.id)
    base = next((arm.name for arm in arms if arm.is_base), None)
    task = Task(store, study, arms, name, stage)
    names = [arm.name for arm in arms]
    asked = st.multiselect("Arms", names, placeholder=f"the base and the best {BEST}", key="arms", bind="query-params")
    chosen = asked or task.best(base, BEST)
    over = [arm for arm in names if arm in chosen or drawn["others"]]
    runs = [run for arm in over for run in task.runs[arm]]
    found = read(store, study, task, runs, metric, split, axis, smoothing, stage)
    positive = kept(found, scales)
    if not len(found):
        st.info("These arms have no such curve yet." if axis == "step" else f"The ledger does not know the {axis}.")
        return
    highlighted = chosen if drawn["others"] else over
    palette = colors.arms(names, base, highlighted)
    bounds = task.about.get("bounds") if metric == main else None
    middle = means(positive, ["arm", "step"], bounds)
    if drawn["candidates"]:
        several = task.candidates(over)
        every = kept(read(store, study, task, several, metric, split, axis, smoothing, stage), scales)
        thin = means(every, ["arm", "trial", "step"], None).assign(seed=0, state="done")
    else:
        thin = positive if drawn["seeds"] else positive[positive["state"] == "diverged"]
    offered = names if len(names) <= FEW else over
    title = f"{name}: {metric} on {split}"
    picture = chart(thin, middle, {arm: palette[arm] for arm in offered}, over, title, axis, scales, bool(smoothing))
    downloads.chart(
        picture,
        f"{study.name} {name} {metric} {split} over {axis}",
        rows=middle,
        about=f"{title}, over {AXES[axis]}: a line with a band for each of {', '.join(over)}",
        height=520,
        key=f"curves {' '.join(over)}",  # another key forgets the click that led here
        on_select=lambda: switch(f"curves {' '.join(over)}", over),
        selection_mode=SWITCH,
    )
    captions(task, over, asked or names, found, positive, stage, axis, smoothing, drawn["candidates"])
    by_length(store, study, task, over, metric, split, stage, {arm: palette[arm] for arm in over})


def options() -> tuple[str, float, dict[str, bool], dict[str, bool]]:
    """The axis, the smoothing, which scales are logarithmic, and what is drawn besides the means."""
    columns = st.columns([1, 1, 2], vertical_alignment="bottom")
    axis = columns[0].selectbox("Over", list(AXES), key="axis", bind="query-params")
    smoothing = columns[1].slider(
        "Smoothing",
        0.0,
        0.99,
        0.0,
        0.01,
        key="smoothing",
        bind="query-params",
        help="An exponential moving average of each run: a point weighs this much less than the next one.",
    )
    with columns[2].container(horizontal=True):
        toggles = {
            name: st.toggle(text, value, key=name, bind="query-params")
            for name, text, value in (
                ("logx", "Log x", False),
                ("logy", "Log y", False),
                ("seeds", "Seeds", True),
                ("candidates", "All candidates", False),
                ("others", "Other arms", False),
            )
        }
    scales = {"x": toggles["logx"], "y": toggles["logy"]}
    return axis, smoothing, scales, {name: toggles[name] for name in ("seeds", "candidates", "others")}


def read(
    store: Store,
    study: Study,
    task: Task,
    runs: Sequence[Chosen],
    metric: str,
    split: str,
    axis: str,
    smoothing: float,
    stage: Stage,
) -> pd.DataFrame:
    """The points of some runs, thinned so that a browser draws them at once."""
    keys = dict.fromkeys(run.trial.key for run in runs)
    most = max(2, min(POINTS, ROWS // max(len(runs), 1)))
    points = store.curves(study.id, task.name, metric, split, stage=stage, max_points=most, trials=keys)
    return frame(task, runs, points, axis, smoothing)


def kept(points: pd.DataFrame, scales: Mapping[str, bool]) -> pd.DataFrame:
    """The points that logarithmic scales can show."""
    if scales["x"]:
        points = points[points["x"] > 0]
    if scales["y"]:
        points = points[(points["value"] > 0) & (points["smooth"] > 0)]
    return points


def chart(
    thin: pd.DataFrame,
    middle: pd.DataFrame,
    palette: Mapping[str, str],
    over: Sequence[str],
    title: str,
    axis: str,
    scales: Mapping[str, bool],
    smoothed: bool,
) -> Any:
    """Thin lines of runs, a band and a thick line for each arm; where smoothed, also what was recorded, faint."""
    off = [arm for arm in palette if arm not in over]
    x = alt.X(
        "x:Q",
        title=AXES[axis],
        axis=alt.Axis(tickCount=10, format="~s"),
        scale=alt.Scale(nice=False, type="log" if scales["x"] else "linear"),
    )
    scale = alt.Scale(zero=False, type="log" if scales["y"] else "linear")
    y = alt.Y("smooth:Q", title=title, scale=scale, axis=alt.Axis(tickCount=10))
    color = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=list(palette), range=list(palette.values())),
        sort=None,
        legend=alt.Legend(
            title="click to switch",
            orient="right",
            labelLimit=0,
            symbolLimit=len(palette),  # every arm; Vega-Lite stops at 30
            symbolStrokeWidth=3,
            labelExpr=f"indexof({off}, datum.label) < 0 ? datum.label : datum.label + ' (off)'",
        ),
    )
    dots = middle["step"].nunique() == 1  # a line needs two points to be seen
    figure = alt.Tooltip("smooth:Q", format=".4f")
    layers = [
        alt.Chart(thin[["arm", "trial", "seed", "state", "step", "x", "smooth"]])
        .mark_line(strokeWidth=1, opacity=0.35, point=dots)
        .encode(
            x=x,
            y=y,
            color=color,
            detail=["trial:N", "seed:N"],
            strokeDash=alt.StrokeDash(
                "state:N", scale=alt.Scale(domain=["done", "diverged"], range=[[1, 0], [4, 3]]), legend=None
            ),
            tooltip=["arm:N", "seed:N", "step:Q", figure, "state:N"],
        ),
    ]
    base = alt.Chart(middle).encode(x=x, color=color)
    layers.append(base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", scale=scale, title=title), y2="high:Q"))
    if smoothed:
        layers.append(base.mark_line(strokeWidth=1.5, opacity=0.3).encode(y=alt.Y("value:Q", title=title, scale=scale)))
    tooltip = [
        "arm:N",
        "step:Q",
        *(alt.Tooltip(f"{name}:Q", format=".4f") for name in ("smooth", "low", "high")),
        "n:Q",
    ]
    layers.append(base.mark_line(strokeWidth=3, point=dots).encode(y=y, tooltip=tooltip))
    click = alt.selection_point(name=SWITCH, fields=["arm"], bind="legend", toggle="true")
    return alt.layer(*layers).add_params(click, downloads.zoom())


def switch(key: str, over: Sequence[str]) -> None:
    """Draws an arm that was clicked in the legend, or leaves it out."""
    clicked = {picked["arm"] for picked in st.session_state[key]["selection"].get(SWITCH, []) if "arm" in picked}
    if clicked:
        st.session_state["arms"] = [arm for arm in over if arm not in clicked] + [
            arm for arm in sorted(clicked) if arm not in over
        ]


def captions(
    task: Task,
    over: Sequence[str],
    asked: Sequence[str],
    found: pd.DataFrame,
    positive: pd.DataFrame,
    stage: Stage,
    axis: str,
    smoothing: float,
    candidates: bool,
) -> None:
    """What the lines are, and what is not drawn. over: the arms that are drawn. asked: those to speak of."""
    thin = "a candidate's mean over its seeds" if candidates else "a seed"
    lines = [
        f"A thick line is an arm's mean over the seeds that finished, of {RUNS[stage]}. A thin line is {thin}.",
        "The band is the 95% t interval of that mean at each point by itself, as in the report's column of means. "
        "Whether two arms differ is tested on the page Answer, not by whether their bands overlap.",
    ]
    if smoothing:
        lines.append(
            f"Smoothed: in the moving average of a run, each point weighs {smoothing:g} times the next. The faint line "
            "of each arm is its mean as recorded."
        )
    if axis == "seconds":
        lines.append("The time of steps alone, by the measured tokens per second: without start and evaluations.")
    if axis == "flops":
        lines.append("Matrix products of training, three times those of a forward pass, without embedding and logits.")
    if lost := len(found) - len(positive):
        lines.append(f"A logarithmic scale leaves out {lost} points that are not positive.")
    diverged = {arm: [run.seed for run in task.runs[arm] if run.state == "diverged"] for arm in {*over, *asked}}
    for arms, said in ((over, "Diverged, dashed up to where they did"), (asked, "Diverged, and not drawn")):
        seeds = [f"{arm} (seed {seed})" for arm in arms for seed in diverged.pop(arm, [])]
        if seeds:
            lines.append(f"{said}: {', '.join(seeds)}.")
    if missing := [arm for arm in asked if not task.runs[arm] or (arm in over and arm not in set(found["arm"]))]:
        lines.append(f"No curve yet: {', '.join(missing)}.")
    for line in lines:
        st.caption(plain(line))


def by_length(
    store: Store,
    study: Study,
    task: Task,
    over: Sequence[str],
    metric: str,
    split: str,
    stage: Stage,
    palette: Mapping[str, str],
) -> None:
    """The metric at the last step against the length of the examples, where the task is measured at several."""
    here = {m for its, name, where, m in store.measured(study.id) if (its, name, where) == (stage, task.name, split)}
    at = lengths(metric, here)
    if len({length for length, _ in at.values()}) < 2:
        return
    own = metric.partition("@")[0]
    known = {(run.arm, run.trial.key, run.seed): run for arm in over for run in task.runs[arm]}
    wanted = dict.fromkeys(run.trial.key for run in known.values())
    finals = store.final_metrics(study.id, stage=stage, metrics={(split, m) for m in at}, trials=wanted)
    rows = [
        (final.arm, final.trial, final.seed, final.run_state, *at[final.metric], final.value, final.value)
        for final in finals
        if final.metric in at and (final.arm, final.trial, final.seed) in known
    ]
    points = pd.DataFrame(rows, columns=["arm", "trial", "seed", "state", "x", "pairs", "value", "smooth"])
    points["length"] = points["x"]
    bounds = task.about.get("bounds") if own == task.about["metric"] else None
    middle = means(points.fillna({"pairs": 0}), ["arm", "pairs", "length"], bounds)
    st.subheader("Against length", anchor="length")
    title, trained = f"{task.name}: {own} on {split}", length_of(task.about)
    downloads.chart(
        length_chart(middle, palette, title, trained),
        f"{study.name} {task.name} {own} {split} against length",
        rows=middle,
        about=f"{title} against the length of examples: a line with a band for each of {', '.join(over)}",
        height=380,
    )
    told = ["At the last step: the mean of the same seeds with its 95% t interval at each length by itself."]
    if trained is not None:
        told.append(f"The dashed line marks the length of training, {trained}.")
    if len(middle["pairs"].unique()) > 1:
        told.append("The dash of a line tells how many pairs an example has.")
    st.caption(plain(" ".join(told)))


def length_chart(middle: pd.DataFrame, palette: Mapping[str, str], title: str, trained: int | None) -> Any:
    values = sorted({*middle["length"].tolist(), *([trained] if trained else [])})
    x = alt.X("length:Q", title="length", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(values=values))
    base = alt.Chart(middle).encode(
        x=x,
        color=alt.Color(
            "arm:N",
            scale=alt.Scale(domain=list(palette), range=list(palette.values())),
            sort=None,
            legend=alt.Legend(title=None, labelLimit=0, symbolLimit=len(palette)),
        ),
    )
    scale = alt.Scale(zero=False)
    dash = alt.StrokeDash("pairs:N", legend=alt.Legend() if middle["pairs"].nunique() > 1 else None)
    tooltip = ["arm:N", "length:Q", *(alt.Tooltip(f"{n}:Q", format=".4f") for n in ("smooth", "low", "high")), "n:Q"]
    layers = [
        base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", scale=scale, title=title), y2="high:Q", detail="pairs:N"),
        base.mark_line(strokeWidth=2.5, point=True).encode(
            y=alt.Y("smooth:Q", scale=scale, title=title), strokeDash=dash, tooltip=tooltip
        ),
    ]
    if trained is not None:
        mark = alt.Chart(pd.DataFrame({"length": [trained]})).mark_rule(strokeDash=[4, 4], color=colors.ACCENT)
        layers.append(mark.encode(x=x, tooltip=[alt.Tooltip("length:Q", title="length of training")]))
    return alt.layer(*layers).add_params(downloads.zoom())


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
