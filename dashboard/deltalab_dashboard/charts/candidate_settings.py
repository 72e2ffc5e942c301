"""Draws the candidates of a search by their settings: by all side by side, or by one or two."""

from statistics import fmean
from typing import Any

import altair as alt
import pandas as pd

from deltalab_dashboard.charts.axes import Axis, axis
from deltalab_dashboard.charts.candidates import KINDS, CandidateTable, Chart, axis_title, finite, legend
from deltalab_dashboard.colors import OTHERS, UNDECIDED, WORSE

MOST_LINES = 400
"""The most lines in parallel coordinates.

If there are more candidates, the worst of those that are not highlighted are left out.
"""
BINS = 8
"""The number of parts of a setting's range. The scores within a part are averaged."""
ABSENT = -0.12
"""The place at which a line passes the axis of a setting that the candidate does not have. It is left of the axis."""
AXIS_PIXELS = 40
"""The distance of two axes of parallel coordinates."""


def by_all_settings(table: CandidateTable, highlighted: set[str], order: str) -> tuple[Chart, pd.DataFrame, int]:
    """Draws parallel coordinates: an axis for each setting and objective, and a line for each candidate.

    The axes lie below one another, so that each has room for its name. Scores are those at the lowest fidelity, which
    all candidates have. On the axes of objectives, right is better.

    Args:
        table: The candidates.
        highlighted: The names of the candidates to highlight.
        order: The objective that ranks the candidates. If there are too many lines, the chart keeps the highlighted
            candidates and the best of the other candidates by this objective.

    Returns:
        The chart, its data, and the number of candidates that the chart leaves out.
    """
    scored = [row for row in table.rows if finite(row, *(("first", name) for name in table.objectives))]
    sign = table.sign(order)
    ranked = sorted(scored, key=lambda row: (row["name"] not in highlighted, -sign * row["first", order]))
    rows = ranked[: max(MOST_LINES, len(highlighted))]
    axes: list[tuple[str, Any, Axis, bool]] = []
    for path, search in table.searched.items():
        known = [row[path] for row in rows if row[path] is not None]
        if known:
            axes.append((path, path, axis(known, search), False))
    for name, maximize in table.objectives.items():
        of_scores = axis([row["first", name] for row in rows], None)
        axes.append((table.labels[name], ("first", name), of_scores, not maximize))
    places, ticks = [], []
    for place, (title, key, along, turned) in enumerate(axes):
        for row in rows:
            value = row[key]
            at = ABSENT if value is None else along.share(value)
            places.append(
                {
                    "setting": title,
                    "place": place,
                    "candidate": row["name"],
                    "what it is": row["what"],
                    "settings": row["settings"],
                    "kind": row["kind"] if row["name"] in highlighted else "other",
                    "at": 1 - at if turned else at,
                    "value": "does not exist" if value is None else along.text(value),
                }
            )
        count = len(along.ticks())
        ticks += [
            {"setting": title, "at": 1 - at if turned else at, "value": text, "count": count}
            for at, text in along.ticks()
        ]
        if any(row[key] is None for row in rows):
            ticks.append({"setting": title, "at": ABSENT, "value": "absent", "count": 10})
    frame = pd.DataFrame(places)
    x = alt.X("at:Q", axis=None, scale=alt.Scale(domain=[ABSENT - 0.05, 1.05], nice=False))
    y = alt.Y(
        "setting:N", sort=[title for title, *_ in axes], title=None, scale=alt.Scale(type="point", padding=0.6),
        axis=alt.Axis(labelLimit=0, labelPadding=10, labelFontWeight="bold", domain=False, ticks=False, grid=True),
    )  # fmt: skip
    order_of_axes = alt.Order("place:Q")
    picked = alt.selection_point(name="picked", fields=["candidate"], on="click", empty=False)
    tooltip = ["candidate:N", "what it is:N", "setting:N", "value:N", "settings:N"]
    layers: list[Any] = []
    present = [kind for kind in KINDS if kind in set(frame["kind"])]
    scale = alt.Scale(domain=present, range=[KINDS[kind][0] for kind in present])
    others, bright = frame[frame["kind"] == "other"], frame[frame["kind"] != "other"]
    layers.append(
        alt.Chart(others)
        .mark_line(color=OTHERS, strokeWidth=1, opacity=0.45)
        .encode(x=x, y=y, order=order_of_axes, detail="candidate:N", tooltip=tooltip)
    )
    layers.append(
        alt.Chart(bright)
        .mark_line()
        .encode(
            x=x, y=y, order=order_of_axes, detail="candidate:N", tooltip=tooltip,
            color=alt.Color("kind:N", scale=scale, legend=legend("bottom")),
            strokeDash=alt.StrokeDash(
                "kind:N", legend=None,
                scale=alt.Scale(domain=present, range=[[5, 4] if kind == "base" else [1, 0] for kind in present]),
            ),
            strokeWidth=alt.condition(picked, alt.value(5), alt.value(2)),
            opacity=alt.condition(picked, alt.value(1), alt.value(0.75)),
        )
        .add_params(picked)
    )  # fmt: skip
    marks = alt.Scale(domain=present, range=[KINDS[kind][1] for kind in present])
    layers.append(
        alt.Chart(bright)
        .mark_point(filled=True, size=50, opacity=1)
        .encode(
            x=x, y=y, tooltip=tooltip,
            color=alt.Color("kind:N", scale=scale, legend=legend("bottom")),
            shape=alt.Shape("kind:N", scale=marks, legend=legend("bottom")),
        )
    )  # fmt: skip
    layers.append(
        alt.Chart(pd.DataFrame(ticks))
        .mark_text(dy=-11, fontSize=11, color=UNDECIDED, limit={"expr": "0.8 * width / datum.count - 6"})
        .encode(x=x, y=y, text="value:N")
    )
    drawn = alt.layer(*layers).properties(height=AXIS_PIXELS * len(axes))
    return drawn, frame.drop(columns="place"), len(ranked) - len(rows)


def by_setting(table: CandidateTable, path: str, objective: str) -> tuple[Chart, pd.DataFrame] | None:
    """Draws the scores of candidates against one setting, and the mean score in each part of the setting's range.

    Scores are those at the lowest fidelity.

    Returns:
        The chart and its data. None if no candidate has both the setting and a score.
    """
    key = ("first", objective)
    rows = [row for row in table.rows if row[path] is not None and finite(row, key)]
    if not rows:
        return None
    along = axis([row[path] for row in rows], table.searched[path])
    frame = pd.DataFrame(
        {
            "candidate": [row["name"] for row in rows],
            "what it is": [row["what"] for row in rows],
            "kind": [row["kind"] for row in rows],
            "size": [KINDS[row["kind"]][2] for row in rows],
            "settings": [row["settings"] for row in rows],
            "value": [along.text(row[path]) if along.words else row[path] for row in rows],
            "score": [row[key] for row in rows],
        }
    )
    y = alt.Y("score:Q", title=axis_title(table, objective), scale=alt.Scale(zero=False))
    present = [kind for kind in KINDS if kind in set(frame["kind"])]
    color, shape = (alt.Scale(domain=present, range=[KINDS[kind][i] for kind in present]) for i in range(2))
    points = (
        alt.Chart(frame[::-1])
        .mark_point(filled=True, opacity=0.85, stroke="white", strokeWidth=0.5)
        .encode(
            x=along.encoding("value", path),
            y=y,
            color=alt.Color("kind:N", scale=color, legend=legend("top")),
            shape=alt.Shape("kind:N", scale=shape, legend=legend("top")),
            size=alt.Size("size:Q", scale=None),
            tooltip=[
                "candidate:N", "what it is:N", "kind:N", "value:N", alt.Tooltip("score:Q", format=",.4~g"), "settings:N"
            ],
        )
    )  # fmt: skip
    cells: dict[Any, list[float]] = {}
    for row in rows:
        cells.setdefault(along.cell(row[path], BINS), []).append(row[key])
    means = pd.DataFrame(
        [
            {"from": low, "to": high, "mean": fmean(scores), "candidates": len(scores)}
            for (low, high), scores in cells.items()
        ]
    )
    tooltip = [alt.Tooltip("mean:Q", format=",.4~g"), "candidates:Q"]
    if along.words:
        strokes = alt.Chart(means).mark_tick(thickness=3, size=44, color=WORSE)
        averages = strokes.encode(x=along.encoding("from", path), y=alt.Y("mean:Q"), tooltip=tooltip)
    else:
        rules = alt.Chart(means).mark_rule(strokeWidth=3, color=WORSE)
        averages = rules.encode(x=along.encoding("from", path), x2="to:Q", y=alt.Y("mean:Q"), tooltip=tooltip)
    return alt.layer(points, averages).properties(height=340), frame.drop(columns="size").rename(
        columns={"value": path, "score": objective}
    )


def by_two_settings(table: CandidateTable, across: str, down: str, objective: str) -> tuple[Chart, pd.DataFrame] | None:
    """Draws a grid over two settings, with the mean score of the candidates in each cell.

    Scores are those at the lowest fidelity. A cell without candidates stays empty.

    Args:
        table: The candidates.
        across: The path of the setting on the horizontal axis.
        down: The path of the setting on the vertical axis.
        objective: The objective whose scores are averaged.

    Returns:
        The chart and its data. None if no candidate has both settings and a score.
    """
    key = ("first", objective)
    rows = [row for row in table.rows if row[across] is not None and row[down] is not None and finite(row, key)]
    if not rows:
        return None
    x, y = (
        axis([row[path] for row in table.rows if row[path] is not None], table.searched[path])
        for path in (across, down)
    )
    cells: dict[Any, list[float]] = {}
    for row in rows:
        cells.setdefault((x.cell(row[across], BINS), y.cell(row[down], BINS)), []).append(row[key])
    frame = pd.DataFrame(
        [
            {
                "across": left, "across to": right, "down": low, "down to": high,
                "mean": fmean(scores), "best": max(scores, key=lambda score: table.sign(objective) * score),
                "candidates": len(scores),
            }
            for ((left, right), (low, high)), scores in cells.items()
        ]
    )  # fmt: skip
    encoding: dict[str, Any] = {"x": x.encoding("across", across), "y": y.encoding("down", down, vertical=True)}
    encoding |= {} if x.words else {"x2": "across to:Q"}
    encoding |= {} if y.words else {"y2": "down to:Q"}
    cell_chart = (
        alt.Chart(frame, height=380)
        .mark_rect(stroke="white", strokeWidth=1)
        .encode(
            **encoding,
            color=alt.Color(
                "mean:Q", title=f"mean {table.labels[objective]}",
                scale=alt.Scale(scheme="viridis", reverse=not table.objectives[objective]),
            ),
            tooltip=[
                alt.Tooltip("across:N", title=across), *([] if x.words else [alt.Tooltip("across to:N", title="to")]),
                alt.Tooltip("down:N", title=down), *([] if y.words else [alt.Tooltip("down to:N", title="to")]),
                alt.Tooltip("mean:Q", format=",.4~g"), alt.Tooltip("best:Q", format=",.4~g"), "candidates:Q",
            ],
        )
    )  # fmt: skip
    names = {"across": across, "across to": f"{across} to", "down": down, "down to": f"{down} to"}
    return cell_chart.configure_axis(grid=False), frame.rename(columns=names)
