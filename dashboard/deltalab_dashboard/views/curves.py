"""The page Curves: the mean curve of each arm with its interval, over steps, tokens, time, operations or length."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

import altair as alt
import numpy as np
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.store.models import Stage
from deltalab.study.specs.recorded_study import recorded_tasks
from deltalab_dashboard import colors, downloads
from deltalab_dashboard.charts.curve_lines import AXES, Curves, DrawnRun, curve_points, lengths, mean_points
from deltalab_dashboard.charts.legend import beside_legends, legend_columns
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import plain

# The most points that are read of a run. A screen shows no more.
POINTS = 500
# The most points that are read for all runs together. A browser would take seconds to draw more.
ROWS = 20_000
# How many arms are drawn beside the base before the reader picks arms.
BEST = 5
# The most seeds that each have a button. More seeds are in a list.
PILLS = 20
# If a study has at most this many arms, the legend lists all of them. Otherwise it lists only the drawn arms.
FEW = 10
# The name of the selection that a click in the legend makes. It is not "switch", since Vega reserves that word.
SWITCH = "clicked"
# The height of the lines in pixels, without the legend.
HEIGHT = 360
# The least distance of two names at the ends of lines, as a share of the range of the means.
APART = 0.045
# A description of the runs whose mean a thick line shows, for each stage.
RUNS: dict[Stage, str] = {
    "confirm": "the run that each seed chose on validation, as in the report",
    "tune": "the runs of each arm's best candidate on validation, which is optimistic",
}


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Learning curves", anchor=False)
    columns = st.columns(4)
    every_stage = store.measured(study.id)
    stage: Stage = columns[0].selectbox("Stage", sorted(get_args(Stage)), key="stage", bind="query-params")
    measured = {(task, metric, split) for of_stage, task, split, metric in every_stage if of_stage == stage}
    if not measured:
        st.info(f"Nothing is measured in the stage '{stage}' yet.")
        return
    tasks = [task for task in recorded_tasks(study) if any(task == measured_task for measured_task, *_ in measured)]
    name = columns[1].selectbox("Task", tasks, key="task", bind="query-params")
    judged = recorded_tasks(study)[name].metric
    metrics = sorted({m for task, m, _ in measured if task == name}, key=lambda m: (m != judged, m))
    metric = columns[2].selectbox("Metric", metrics, key="metric", bind="query-params")
    splits = sorted(
        {s for task, m, s in measured if (task, m) == (name, metric)},
        key=lambda s: (s != "validation", s != "train", s != "test"),
    )
    split = columns[3].selectbox("Split", splits, key="split", bind="query-params")
    axis, smoothing, scales, layers = options()

    arms = store.arms(study.id)
    base = next((arm.name for arm in arms if arm.is_base), None)
    curves = Curves(store, study, arms, name, stage)
    names = [arm.name for arm in arms]
    picked = st.multiselect("Arms", names, placeholder=f"the base and the best {BEST}", key="arms", bind="query-params")
    seeds = sorted({run.seed for runs in curves.runs.values() for run in runs})
    if len(seeds) <= PILLS:
        seed = st.pills("One seed alone", seeds, key="seed", bind="query-params")
    else:
        seed = st.selectbox(
            "One seed alone", seeds, index=None, placeholder="the mean of all", key="seed", bind="query-params"
        )
    highlighted = picked or curves.best(base, BEST)
    drawn = [arm for arm in names if arm in highlighted or layers["others"]]
    runs = [run for arm in drawn for run in curves.runs[arm] if seed in (None, run.seed)]
    every_point = read_points(store, study, curves, runs, metric, split, axis, smoothing, stage)
    points = on_scales(every_point, scales)
    if not len(every_point):
        st.info("These arms have no such curve yet." if axis == "step" else f"The ledger does not know the {axis}.")
        return
    palette = colors.arm_colors(names, base, highlighted if layers["others"] else drawn)
    bounds = curves.task.bounds if metric == judged else None
    means = mean_points(points, ["arm", "step"], bounds)
    if layers["candidates"]:
        candidates = curves.candidates(drawn)
        of_candidates = read_points(store, study, curves, candidates, metric, split, axis, smoothing, stage)
        thin = mean_points(on_scales(of_candidates, scales), ["arm", "trial", "step"], None)
        thin = thin.assign(seed=0, state="done")
    else:
        thin = points if layers["seeds"] else points[points["state"] == "diverged"]
    legend = names if len(names) <= FEW else drawn
    title = f"{name}: {metric} on {split}"
    figure = curve_chart(
        thin, means, {arm: palette[arm] for arm in legend}, drawn, title, axis, scales,
        base=base, smoothed=bool(smoothing), bands=layers["bands"],
    )  # fmt: skip
    downloads.chart(
        figure,
        f"{study.name} {name} {metric} {split} over {axis}",
        rows=means,
        description=f"{title}, over {AXES[axis]}: a line with a band for each of {', '.join(drawn)}",
        key=f"curves {' '.join(drawn)}",  # A new key for other arms makes the chart forget the last click.
        on_select=lambda: switch(f"curves {' '.join(drawn)}", drawn),
        selection_mode=SWITCH,
    )
    lost = len(every_point) - len(points)
    captions(curves, drawn, picked or names, set(every_point["arm"]), lost, stage, axis, smoothing, layers, seed)
    by_length(store, study, curves, drawn, metric, split, stage, {arm: palette[arm] for arm in drawn})


def options() -> tuple[str, float, dict[str, bool], dict[str, bool]]:
    """Draws the choices of the axis, the smoothing, the logarithmic scales, and the lines besides the means.

    Returns:
        The axis, the smoothing, whether the scales "x" and "y" are logarithmic, and whether to draw the bands and each
        kind of lines.
    """
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
                ("bands", "Bands", False),
                ("seeds", "Seeds", False),
                ("candidates", "All candidates", False),
                ("others", "Other arms", False),
            )
        }
    scales = {"x": toggles["logx"], "y": toggles["logy"]}
    return axis, smoothing, scales, {name: toggles[name] for name in ("bands", "seeds", "candidates", "others")}


def read_points(
    store: Store,
    study: Study,
    curves: Curves,
    runs: Sequence[DrawnRun],
    metric: str,
    split: str,
    axis: str,
    smoothing: float,
    stage: Stage,
) -> pd.DataFrame:
    """Reads the points of the given runs, thinned out so that a browser draws them quickly."""
    keys = dict.fromkeys(run.trial.key for run in runs)
    most = max(2, min(POINTS, ROWS // max(len(runs), 1)))
    points = store.curves(study.id, curves.task.name, metric, split, stage=stage, max_points=most, trials=keys)
    return curve_points(curves, runs, points, axis, smoothing)


def on_scales(points: pd.DataFrame, scales: Mapping[str, bool]) -> pd.DataFrame:
    """Returns the points that the scales can show. A logarithmic scale shows positive values only."""
    if scales["x"]:
        points = points[points["x"] > 0]
    if scales["y"]:
        points = points[(points["value"] > 0) & (points["smooth"] > 0)]
    return points


def curve_chart(
    thin: pd.DataFrame,
    means: pd.DataFrame,
    palette: Mapping[str, str],
    drawn: Sequence[str],
    title: str,
    axis: str,
    scales: Mapping[str, bool],
    *,
    base: str | None,
    smoothed: bool,
    bands: bool,
) -> Any:
    """Draws a thin line for each run, and a thick line for each arm with the arm's name at its end.

    Args:
        thin: The points of the thin lines.
        means: The points of the thick lines.
        palette: The colour of each arm in the legend.
        drawn: The arms that are drawn.
        title: The title of the vertical axis.
        axis: A key of `AXES`.
        scales: Whether the scales "x" and "y" are logarithmic.
        base: The name of the base, whose line is dashed.
        smoothed: Whether curves are smoothed. If so, a faint line shows the mean of the recorded values.
        bands: Whether to draw the interval of each mean.
    """
    off = [arm for arm in palette if arm not in drawn]
    x = alt.X(
        "x:Q",
        title=AXES[axis],
        axis=alt.Axis(tickCount=10, format="~s"),
        scale=alt.Scale(nice=False, type="log" if scales["x"] else "linear", zero=not scales["x"]),
    )
    scale = alt.Scale(zero=False, type="log" if scales["y"] else "linear")
    y = alt.Y("smooth:Q", title=title, scale=scale, axis=alt.Axis(tickCount=10))
    color = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=list(palette), range=list(palette.values())),
        sort=None,
        legend=alt.Legend(
            title="click to switch",
            orient="bottom",
            columns=legend_columns(palette),
            labelLimit=0,
            symbolLimit=len(palette),  # Vega-Lite would stop after 30 arms.
            symbolStrokeWidth=3,
            labelExpr=f"indexof({off}, datum.label) < 0 ? datum.label : datum.label + ' (off)'",
        ),
    )
    dots = means["step"].nunique() == 1  # A line with a single point would be invisible without a dot.
    value = alt.Tooltip("smooth:Q", format=".4f")
    layers: list[Any] = []
    if len(thin):  # A screen reader would stop at a layer without marks.
        layers.append(
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
                tooltip=["arm:N", "seed:N", "step:Q", value, "state:N"],
            )
        )
    of_means = alt.Chart(means).encode(x=x, color=color)
    if bands:
        layers.append(of_means.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", scale=scale, title=title), y2="high:Q"))
    if smoothed:
        faint = alt.Y("value:Q", title=title, scale=scale)
        layers.append(of_means.mark_line(strokeWidth=1.5, opacity=0.3).encode(y=faint))
    tooltip = [
        "arm:N",
        "step:Q",
        *(alt.Tooltip(f"{name}:Q", format=".4f") for name in ("smooth", "low", "high")),
        "n:Q",
    ]
    dashes = alt.Scale(domain=list(palette), range=[[7, 4] if arm == base else [1, 0] for arm in palette])
    dash = alt.StrokeDash("arm:N", scale=dashes, legend=None)
    layers.append(of_means.mark_line(strokeWidth=2.5, point=dots).encode(y=y, strokeDash=dash, tooltip=tooltip))
    ends = line_ends(means, logarithmic=scales["y"])
    theme = st.context.theme.type or "light"
    ends["ink"] = [colors.text_color(palette[arm], theme) for arm in ends["arm"]]
    layers.append(
        alt.Chart(ends)
        .mark_text(align="left", dx=6, fontSize=12, clip=False)
        .encode(x=x, y=alt.Y("at:Q", title=title, scale=scale), text="arm:N", color=alt.Color("ink:N", scale=None))
    )
    click = alt.selection_point(name=SWITCH, fields=["arm"], bind="legend", toggle="true")
    # The dashes of runs and of arms have scales of their own.
    figure = alt.layer(*layers).resolve_scale(strokeDash="independent").add_params(click, downloads.zoom())
    return beside_legends(figure, HEIGHT)


def line_ends(means: pd.DataFrame, *, logarithmic: bool) -> pd.DataFrame:
    """Returns a row for each arm with the end of its line, and the height `at` at which its name is written.

    Names that would cover one another are moved apart by `APART` of the chart's height, as little as that takes.

    Args:
        means: The points of the lines.
        logarithmic: Whether the vertical scale is logarithmic.
    """
    ends = means.sort_values("x").groupby("arm", sort=False, as_index=False).last()[["arm", "x", "smooth"]]
    heights = np.log(means["smooth"]) if logarithmic else means["smooth"]
    gap = APART * float(heights.max() - heights.min())
    ends["at"] = np.log(ends["smooth"]) if logarithmic else ends["smooth"]
    ends = ends.sort_values("at", ignore_index=True)
    wanted = ends["at"].to_numpy() - gap * np.arange(len(ends))
    ends["at"] = in_order(wanted) + gap * np.arange(len(ends))
    if logarithmic:
        ends["at"] = np.exp(ends["at"])
    return ends


def in_order(values: np.ndarray) -> np.ndarray:
    """Returns the sequence that never falls and has the least sum of squared differences from the values.

    Examples:
        >>> in_order(np.array([0.0, 3.0, 1.0, 5.0])).tolist()
        [0.0, 2.0, 2.0, 5.0]
    """
    blocks: list[tuple[float, int]] = []
    for value in values:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] > mean:  # Blocks in the wrong order have one mean.
            before, size = blocks.pop()
            mean, count = (before * size + mean * count) / (size + count), size + count
        blocks.append((mean, count))
    return np.repeat([mean for mean, _ in blocks], [count for _, count in blocks])


def switch(key: str, drawn: Sequence[str]) -> None:
    """Picks the arm that was clicked in the legend. If the arm was already drawn, it is no longer picked.

    Args:
        key: The session's key for the chart.
        drawn: The arms that were drawn.
    """
    clicked = {entry["arm"] for entry in st.session_state[key]["selection"].get(SWITCH, []) if "arm" in entry}
    if clicked:
        st.session_state["arms"] = [arm for arm in drawn if arm not in clicked] + [
            arm for arm in sorted(clicked) if arm not in drawn
        ]


def captions(
    curves: Curves,
    drawn: Sequence[str],
    named: Sequence[str],
    with_points: Collection[str],
    lost: int,
    stage: Stage,
    axis: str,
    smoothing: float,
    layers: Mapping[str, bool],
    seed: int | None,
) -> None:
    """Draws captions that explain the lines, and that name what is not drawn.

    Args:
        curves: The runs of the task.
        drawn: The arms that are drawn.
        named: The arms about which a caption says why they are not drawn, if they are not.
        with_points: The arms that have at least one point.
        lost: The number of points that a logarithmic scale cannot show.
        stage: The stage of the runs.
        axis: A key of `AXES`.
        smoothing: The smoothing, as in `curve_points`.
        layers: Whether to draw the bands and each kind of lines, as `options` returns it.
        seed: The seed that is drawn alone. None if the mean of all is drawn.
    """
    whose = "an arm's mean over the seeds that finished" if seed is None else f"seed {seed} of an arm"
    lines = [f"A thick line is {whose}, of {RUNS[stage]}. The base is dashed."]
    if layers["candidates"]:
        lines.append("A thin line is a candidate's mean over its seeds.")
    elif layers["seeds"]:
        lines.append("A thin line is a seed.")
    lines.append(
        "The band is the 95% t interval of that mean at each point by itself, as in the report's column of means. "
        "Whether two arms differ is tested on the page Answer, not by whether their bands overlap."
        if layers["bands"]
        else "Whether two arms differ is tested on the page Answer, not by whether their lines cross."
    )
    if smoothing:
        lines.append(
            f"Smoothed: in the moving average of a run, each point weighs {smoothing:g} times the next. The faint line "
            "of each arm is its mean as recorded."
        )
    if axis == "seconds":
        lines.append("The time of steps alone, by the measured tokens per second: without start and evaluations.")
    if axis == "flops":
        lines.append("Matrix products of training, three times those of a forward pass, without embedding and logits.")
    if lost:
        lines.append(f"A logarithmic scale leaves out {lost} points that are not positive.")
    diverged = {arm: [run.seed for run in curves.runs[arm] if run.state == "diverged"] for arm in {*drawn, *named}}
    for arms, text in ((drawn, "Diverged, dashed up to where they did"), (named, "Diverged, and not drawn")):
        seeds = [f"{arm} (seed {seed})" for arm in arms for seed in diverged.pop(arm, [])]
        if seeds:
            lines.append(f"{text}: {', '.join(seeds)}.")
    if missing := [arm for arm in named if not curves.runs[arm] or (arm in drawn and arm not in with_points)]:
        lines.append(f"No curve yet: {', '.join(missing)}.")
    for line in lines:
        st.caption(plain(line))


def by_length(
    store: Store,
    study: Study,
    curves: Curves,
    arms: Sequence[str],
    metric: str,
    split: str,
    stage: Stage,
    palette: Mapping[str, str],
) -> None:
    """Draws the metric at the last step against the length of the examples.

    If the metric was not measured at several lengths, nothing is drawn.
    """
    place = (stage, curves.task.name, split)
    names = {name for of_stage, task, on, name in store.measured(study.id) if (of_stage, task, on) == place}
    length_of = lengths(metric, names)
    if len({length for length, _ in length_of.values()}) < 2:
        return
    quantity = metric.partition("@")[0]
    known = dict.fromkeys((run.arm, run.trial.key, run.seed) for arm in arms for run in curves.runs[arm])
    keys = dict.fromkeys(key for _, key, _ in known)
    finals = store.final_metrics(study.id, stage=stage, metrics={(split, name) for name in length_of}, trials=keys)
    rows = [
        (final.arm, final.trial, final.seed, final.run_state, *length_of[final.metric], final.value, final.value)
        for final in finals
        if final.metric in length_of and (final.arm, final.trial, final.seed) in known
    ]
    points = pd.DataFrame(rows, columns=["arm", "trial", "seed", "state", "x", "pairs", "value", "smooth"])
    points["length"] = points["x"]
    bounds = curves.task.bounds if quantity == curves.task.metric else None
    means = mean_points(points.fillna({"pairs": 0}), ["arm", "pairs", "length"], bounds)
    st.subheader("Against length", anchor="length")
    title, trained = f"{curves.task.name}: {quantity} on {split}", curves.task.length
    downloads.chart(
        length_chart(means, palette, title, trained),
        f"{study.name} {curves.task.name} {quantity} {split} against length",
        rows=means,
        description=f"{title} against the length of examples: a line with a band for each of {', '.join(arms)}",
        height=380,
    )
    sentences = ["At the last step: the mean of the same seeds with its 95% t interval at each length by itself."]
    if trained is not None:
        sentences.append(f"The dashed line marks the length of training, {trained}.")
    if len(means["pairs"].unique()) > 1:
        sentences.append("The dash of a line tells how many pairs an example has.")
    st.caption(plain(" ".join(sentences)))


def length_chart(means: pd.DataFrame, palette: Mapping[str, str], title: str, trained: int | None) -> Any:
    """Draws a line with a band for each arm against length. A dashed line marks the training length, `trained`."""
    values = sorted({*means["length"].tolist(), *([trained] if trained else [])})
    x = alt.X("length:Q", title="length", scale=alt.Scale(type="log", nice=False), axis=alt.Axis(values=values))
    base = alt.Chart(means).encode(
        x=x,
        color=alt.Color(
            "arm:N",
            scale=alt.Scale(domain=list(palette), range=list(palette.values())),
            sort=None,
            legend=alt.Legend(title=None, labelLimit=0, symbolLimit=len(palette)),
        ),
    )
    scale = alt.Scale(zero=False)
    dash = alt.StrokeDash("pairs:N", legend=alt.Legend() if means["pairs"].nunique() > 1 else None)
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


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
