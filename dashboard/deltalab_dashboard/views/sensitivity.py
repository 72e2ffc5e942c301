"""The page Sensitivity: each arm's scores against a tuned setting, and whether the arm's best value is an extreme."""

import math
from statistics import fmean
from typing import Any, Literal

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.answers.sensitivity import Sweep, range_end_notes, sensitivity
from deltalab.study.specs.recorded_study import RecordedSpec, recorded_tasks
from deltalab.study.specs.sections.search_space import Search
from deltalab_dashboard import colors, downloads
from deltalab_dashboard.charts.axes import Axis, axis
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import badge, bullets, plain, setting

# The number of parts of a setting's range. If other settings vary too, a line has one point in each part.
PARTS = 5
# The shape of the mark at an arm's best value: place among the values tried -> shape. A triangle points towards values
# that were not tried and may be better.
SHAPES = {"lowest": "triangle-left", "highest": "triangle-right", "between": "diamond"}


def page(store: Store, study: Study) -> None:
    """Draws the page."""
    st.title("Sensitivity", anchor=False)
    st.markdown(badge(study))
    spec = RecordedSpec(study.spec)
    searched = spec.tuned
    if not searched:
        st.info("This study tunes nothing: every arm trains with the values that it lists.")
        return
    by_task = sensitivity(store, study)
    if spec.is_search:
        st.caption(
            "This is the tuning of the base and of the finalists. The page Search shows the search's candidates."
        )
    left, middle, right = st.columns(3)
    task = left.selectbox("Task", list(by_task), key="task", bind="query-params")
    path = middle.selectbox("Tuned", list(searched), key="tuned", bind="query-params")
    splits: list[Literal["validation", "test"]] = ["validation", "test"]
    split = right.selectbox("Split", splits[:1] if spec.is_search else splits, key="split", bind="query-params")
    sweeps, recorded_task = by_task[task], recorded_tasks(study)[task]
    for warning in range_end_notes(sweeps, spec, task, study.state):
        st.warning(plain(warning), icon=":material/warning:")
    names = [arm.name for arm in store.arms(study.id)]
    base = next(arm.name for arm in store.arms(study.id) if arm.is_base)
    tuned_arms = [sweep.arm for sweep in sweeps]
    picked = st.multiselect("Arms", tuned_arms, placeholder="all", key="arms", bind="query-params")
    sweeps = [sweep for sweep in sweeps if not picked or sweep.arm in picked]
    frame = candidate_rows(sweeps, path, split)
    if frame["score"].isna().all():
        st.info("No candidate has a score yet.")
        return
    palette = colors.arm_colors(names, base, picked or names[: len(colors.PALETTE)])
    metric = f"{recorded_task.metric} on {split} ({'higher' if recorded_task.maximize else 'lower'} is better)"
    color_of, several = {sweep.arm: palette[sweep.arm] for sweep in sweeps}, len(searched) > 1
    figure = sensitivity_chart(frame, spec.tuned_on(task)[path], path, metric, color_of, base, several=several)
    name, description = f"{study.name} {task} {path}", f"The score of each arm against {path}"
    downloads.chart(figure, name, rows=frame, description=description)
    st.caption(bullets(notes(frame, path, several)))
    downloads.table(best_rows(sweeps), f"{study.name} {task} best values")


def candidate_rows(sweeps: list[Sweep], path: str, split: Literal["validation", "test"]) -> pd.DataFrame:
    """Returns a row for each candidate of each arm, with the mean, the lowest and the highest score of its seeds."""
    rows = []
    for sweep in sweeps:
        for number, values in sweep.values.items():
            scores = sweep.scores(number, split)
            if path in values:
                rows.append(
                    {
                        "arm": sweep.arm,
                        "value": values[path],
                        "score": fmean(scores) if scores else math.nan,
                        "low": min(scores, default=math.nan),
                        "high": max(scores, default=math.nan),
                        "seeds": len(scores),
                        "not finished": len(sweep.runs.get(number, {})) - len(scores),
                        "best": sweep.ends.get(path, "between") if number == sweep.best else "",
                        "settings": ", ".join(f"{name}={setting(value)}" for name, value in values.items()),
                    }
                )
    columns = ["arm", "value", "score", "low", "high", "seeds", "not finished", "best", "settings"]
    return pd.DataFrame(rows, columns=columns)


def sensitivity_chart(
    frame: pd.DataFrame, search: Search, path: str, metric: str, color_of: dict[str, str], base: str, *, several: bool
) -> alt.LayerChart | alt.FacetChart:
    """Draws a line for each arm through the mean scores of its candidates.

    A bar at each mean spans the scores of the candidate's seeds, and a large mark stands at the arm's best value.

    Args:
        frame: The table that `candidate_rows` returns.
        search: The search space of the setting.
        path: The path of the setting, which is on the horizontal axis.
        metric: The title of the vertical axis.
        color_of: The colour of each arm.
        base: The name of the base, whose line is dashed.
        several: Whether other settings vary too. If so, a line joins the means over the parts of the setting's range.
    """
    frame = frame[frame["score"].notna()]
    along = axis(list(frame["value"]), search)
    frame = frame.assign(value=[along.text(value) if along.words else value for value in frame["value"]])
    x = along.encoding("value", path)
    y = alt.Y("score:Q", title=metric, scale=alt.Scale(zero=False))
    arms = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=list(color_of), range=list(color_of.values())),
        legend=alt.Legend(title=None, labelLimit=260, symbolType="stroke", symbolLimit=len(color_of) + 1),
    )
    dash = alt.StrokeDash(
        "arm:N", scale=alt.Scale(domain=list(color_of), range=[[5, 4] if arm == base else [1, 0] for arm in color_of]),
        legend=None,
    )  # fmt: skip
    tooltip = [
        "arm:N",
        alt.Tooltip("value:N", title=path),
        alt.Tooltip("score:Q", title="mean", format=",.4~g"),
        alt.Tooltip("low:Q", title="seeds from", format=",.4~g"),
        alt.Tooltip("high:Q", title="to", format=",.4~g"),
        "seeds:Q",
        "not finished:Q",
        "settings:N",
    ]
    lines = (
        alt.Chart(trend(frame, along) if several else frame)
        .mark_line(strokeWidth=2)
        .encode(x=x, y=y, color=arms, strokeDash=dash)
    )
    spans = alt.Chart(frame).mark_rule(strokeWidth=1.5, opacity=0.5)
    means = alt.Chart(frame).mark_point(filled=True, size=45, opacity=0.9)
    bests = alt.Chart(frame[frame["best"] != ""]).mark_point(size=260, strokeWidth=3, filled=False, opacity=1)
    shapes = alt.Scale(domain=list(SHAPES), range=list(SHAPES.values()))
    return alt.layer(
        lines,
        spans.encode(x=x, y=alt.Y("low:Q", title=metric), y2="high:Q", color=arms, tooltip=tooltip),
        means.encode(x=x, y=y, color=arms, tooltip=tooltip),
        bests.encode(
            x=x,
            y=y,
            color=arms,
            shape=alt.Shape("best:N", scale=shapes, legend=alt.Legend(title="best value", orient="bottom")),
            tooltip=tooltip,
        ),
    ).properties(height=400)


def trend(frame: pd.DataFrame, along: Axis) -> pd.DataFrame:
    """Returns a row for each arm and part of the range, with the mean value and the mean score of its candidates."""
    cells: dict[tuple[str, Any, Any], list[tuple[Any, float]]] = {}
    for arm, value, score in zip(frame["arm"], frame["value"], frame["score"], strict=True):
        cells.setdefault((arm, *along.cell(value, PARTS)), []).append((value, score))
    return pd.DataFrame(
        [
            {"arm": arm, "value": along.mean([value for value, _ in part]), "score": fmean(score for _, score in part)}
            for (arm, _, _), part in cells.items()
        ]
    )


def notes(frame: pd.DataFrame, path: str, several: bool) -> list[str]:
    """Writes how to read the chart, and which candidates the chart leaves out."""
    sentences = [
        "A point is the mean over a candidate's seeds, its bar spans them. The large marks are each arm's best value."
    ]
    if several:
        sentences.append(
            f"Other settings vary too: a line joins the means of the candidates in {PARTS} parts of the range."
        )
    lost = frame[frame["score"].isna()]
    for value in dict.fromkeys(lost["value"]):
        sentences.append(
            f"No seed finished with {path} {setting(value)}: {', '.join(lost[lost['value'] == value]['arm'])}."
        )
    return sentences


def best_rows(sweeps: list[Sweep]) -> list[dict[str, str]]:
    """Returns a row for each arm, with the values of its best candidate."""
    rows = []
    for sweep in sweeps:
        values = sweep.values.get(sweep.best, {}) if sweep.best is not None else {}
        scores = sweep.scores(sweep.best, "validation") if sweep.best is not None else []
        row = {"arm": sweep.arm, "best values": ", ".join(f"{path} {setting(value)}" for path, value in values.items())}
        row["validation"] = f"{fmean(scores):.4f}" if scores else ""
        row["at an end"] = ", ".join(f"{path}: {end} tried" for path, end in sweep.ends.items())
        rows.append({**row, "candidates": str(len(sweep.values))})
    return rows


if __name__ == "__main__":  # Streamlit runs a page as a script.
    show(page)
