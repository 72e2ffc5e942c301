"""The score of each arm against every value that it tuned: the best value, and a warning where it is an extreme."""

import math
from statistics import fmean
from typing import Any, Literal

import altair as alt
import pandas as pd
import streamlit as st

from deltalab.store import Store, Study
from deltalab.study.answers.sensitivity import Sweep, ends, sensitivity, tuned
from deltalab.study.specs.search_space import Search
from deltalab_dashboard import colors, downloads
from deltalab_dashboard.charts.axes import Axis, axis
from deltalab_dashboard.frame import show
from deltalab_dashboard.text import badge, plain, setting

PARTS = 5  # of a range, in each of which a line has one point, where other settings vary too
# The shape of an arm's best value points to where better ones may lie.
SHAPES = {"lowest": "triangle-left", "highest": "triangle-right", "between": "diamond"}


def page(store: Store, study: Study) -> None:
    st.title("Sensitivity", anchor=False)
    st.markdown(badge(study))
    searched = tuned(study.spec)
    if not searched:
        st.info("This study tunes nothing: every arm trains with the values that it lists.")
        return
    by_task = sensitivity(store, study)
    if study.spec.get("search"):
        st.caption("Of a search, this page shows how the base was tuned. The page Search shows its candidates.")
    left, middle, right = st.columns(3)
    task = left.selectbox("Task", list(by_task), key="task", bind="query-params")
    path = middle.selectbox("Tuned", list(searched), key="tuned", bind="query-params")
    splits: list[Literal["validation", "test"]] = ["validation", "test"]
    split = right.selectbox(
        "Split", splits[:1] if study.spec.get("search") else splits, key="split", bind="query-params"
    )
    sweeps, about = by_task[task], study.provenance["tasks"][task]
    for warning in ends(sweeps, study.spec):
        st.warning(plain(warning), icon=":material/warning:")
    every = [arm.name for arm in store.arms(study.id)]
    base = next(arm.name for arm in store.arms(study.id) if arm.is_base)
    picked = st.multiselect("Arms", [one.arm for one in sweeps], placeholder="all", key="arms", bind="query-params")
    sweeps = [one for one in sweeps if not picked or one.arm in picked]
    frame = points(sweeps, path, split)
    if frame["score"].isna().all():
        st.info("No candidate has a score yet.")
        return
    color = colors.arms(every, base, picked or every[: len(colors.PALETTE)])
    metric = f"{about['metric']} on {split} ({'higher' if about['maximize'] else 'lower'} is better)"
    used, several = {one.arm: color[one.arm] for one in sweeps}, len(searched) > 1
    drawn = chart(frame, searched[path], path, metric, used, base, several=several)
    downloads.chart(drawn, f"{study.name} {task} {path}", rows=frame, about=f"The score of each arm against {path}")
    st.caption("\n".join(f"- {plain(note)}" for note in notes(frame, path, several)))
    downloads.table(best(sweeps), f"{study.name} {task} best values")


def points(sweeps: list[Sweep], path: str, split: Literal["validation", "test"]) -> pd.DataFrame:
    """A row for each candidate of each arm. score: the mean over its seeds, which lie from low to high."""
    rows = []
    for one in sweeps:
        for number, values in one.values.items():
            scores = one.scores(number, split)
            if path in values:
                rows.append(
                    {
                        "arm": one.arm,
                        "value": values[path],
                        "score": math.fsum(scores) / len(scores) if scores else math.nan,
                        "low": min(scores, default=math.nan),
                        "high": max(scores, default=math.nan),
                        "seeds": len(scores),
                        "not finished": len(one.runs.get(number, {})) - len(scores),
                        "best": one.ends.get(path, "between") if number == one.best else "",
                        "settings": ", ".join(f"{name}={setting(value)}" for name, value in values.items()),
                    }
                )
    columns = ["arm", "value", "score", "low", "high", "seeds", "not finished", "best", "settings"]
    return pd.DataFrame(rows, columns=columns)


def chart(
    frame: pd.DataFrame, search: Search, path: str, metric: str, color: dict[str, str], base: str, *, several: bool
) -> alt.LayerChart | alt.FacetChart:
    """A line for each arm through the means of its candidates, a bar over the seeds of each, and the arm's best value.

    path: the setting on the horizontal axis. color: by arm. several: whether other settings vary too; a line then joins
    the means in parts of the range.
    """
    frame = frame[frame["score"].notna()]
    along = axis(list(frame["value"]), search)
    frame = frame.assign(value=[along.text(value) if along.words else value for value in frame["value"]])
    x = along.encoding("value", path)
    y = alt.Y("score:Q", title=metric, scale=alt.Scale(zero=False))
    arms = alt.Color(
        "arm:N",
        scale=alt.Scale(domain=list(color), range=list(color.values())),
        legend=alt.Legend(title=None, labelLimit=260, symbolType="stroke", symbolLimit=len(color) + 1),
    )
    dash = alt.StrokeDash(
        "arm:N", scale=alt.Scale(domain=list(color), range=[[5, 4] if arm == base else [1, 0] for arm in color]),
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
    """The mean score, at their mean value, of each arm's candidates in each part of a range."""
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
    """How to read the chart, and which candidates it lacks."""
    found = [
        "A point is the mean over a candidate's seeds, its bar spans them. The large marks are each arm's best value."
    ]
    if several:
        found.append(
            f"Other settings vary too: a line joins the means of the candidates in {PARTS} parts of the range."
        )
    lost = frame[frame["score"].isna()]
    for value in dict.fromkeys(lost["value"]):
        found.append(
            f"No seed finished with {path} {setting(value)}: {', '.join(lost[lost['value'] == value]['arm'])}."
        )
    return found


def best(sweeps: list[Sweep]) -> list[dict[str, str]]:
    """Each arm's best values, as rows of text."""
    rows = []
    for one in sweeps:
        values = one.values.get(one.best, {}) if one.best is not None else {}
        scores = one.scores(one.best, "validation") if one.best is not None else []
        row = {"arm": one.arm, "best values": ", ".join(f"{path} {setting(value)}" for path, value in values.items())}
        row["validation"] = f"{math.fsum(scores) / len(scores):.4f}" if scores else ""
        row["at an end"] = ", ".join(f"{path}: {end} tried" for path, end in one.ends.items())
        rows.append({**row, "candidates": str(len(one.values))})
    return rows


if __name__ == "__main__":  # how Streamlit runs a page
    show(page)
