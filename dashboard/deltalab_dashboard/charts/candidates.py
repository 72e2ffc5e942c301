"""The candidates of a search as rows, and their chart by two objectives."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import altair as alt
import pandas as pd

from deltalab.statistics.pareto import front
from deltalab.study.searching.candidate_names import titles
from deltalab.study.specs.sections.budget import COSTS
from deltalab.study.specs.sections.search_space import Search
from deltalab_dashboard.colors import ACCENT, BASE, OTHERS, PALETTE, UNDECIDED
from deltalab_dashboard.text import setting

if TYPE_CHECKING:
    from deltalab.study.answers.search_points import Point

Chart = alt.Chart | alt.LayerChart | alt.FacetChart

KINDS = {
    "base": (BASE, "diamond", 150),
    "finalist": (ACCENT, "square", 110),
    "on the front": (PALETTE[0], "circle", 80),
    "dominated": (OTHERS, "circle", 40),
    "no better than chance": (OTHERS, "triangle-down", 40),
    "stopped early": (OTHERS, "cross", 50),
}
"""The colour, shape and size of each kind of candidate."""

WIDTH, HEIGHT = 900, 350
"""About how many pixels a chart's axes have."""
LETTER = 6.2
"""About how many pixels a letter of a name is wide."""


class LabelPlace(NamedTuple):
    """A place of a name beside its mark, in pixels."""

    align: Literal["left", "right"]
    dx: int
    dy: int


PLACES = tuple(
    place for dy in (-9, 12, -24, 27, -39, 42) for place in (LabelPlace("left", 9, dy), LabelPlace("right", -9, dy))
)
"""The places at which a name may stand, the best first."""


@dataclass(frozen=True)
class CandidateTable:
    """The candidates of a search and the base, as the rows from which charts are drawn.

    Attributes:
        rows: A row for each candidate: column -> cell. The columns are `name`; `what`, which says what the candidate
            is; `kind`, a key of `KINDS`; `by`, what drew the candidate, such as `tpe`; `learned`, whether it is better
            than chance; and `settings`, all its settings as text. For each objective, the column with its name
            holds the score, and the column ("first", name) holds the score at the lowest fidelity. For each setting,
            the column with its path holds the value, or None if the candidate does not have the setting.
        searched: The search space of each setting: path -> space.
        objectives: The objectives: name -> whether more is better.
        labels: The objectives as the page writes them: name -> text.
    """

    rows: list[dict[Any, Any]]
    searched: dict[str, Search]
    objectives: dict[str, bool]
    labels: dict[str, str]

    def sign(self, objective: str) -> int:
        """Returns 1 if more of the objective is better, else -1."""
        return 1 if self.objectives[objective] else -1

    def best(self, objective: str) -> dict[Any, Any] | None:
        """Returns the best candidate that was not stopped early, or None if no such candidate has a score.

        If several are equally good, the first is returned.
        """
        scored = [row for row in self.rows if finite(row, objective) and row["kind"] != "stopped early"]
        return max(scored, key=lambda row: self.sign(objective) * row[objective], default=None)

    def best_tenth(self, objective: str) -> set[str]:
        """Returns the names of the best tenth of the candidates that have a score at the lowest fidelity.

        If any candidate has such a score, at least one name is returned.
        """
        scored = [row for row in self.rows if finite(row, ("first", objective))]
        scored.sort(key=lambda row: -self.sign(objective) * row["first", objective])
        return {row["name"] for row in scored[: len(scored) // 10 or 1]}


def candidate_table(
    points: Sequence["Point"], searched: Mapping[str, Search], objectives: Mapping[str, bool], rungs: int
) -> CandidateTable:
    """Makes the table of candidates.

    Args:
        points: The candidates and the base.
        searched: The search space of each setting: path -> space.
        objectives: The objectives: name -> whether more is better.
        rungs: The number of rungs of successive halving. It is 1 for a search without successive halving.
    """
    title_of = titles([(point.name, point.values) for point in points])
    rows = []
    for point in points:
        row: dict[Any, Any] = {
            "name": point.name,
            "what": "the base" if point.number is None else title_of[point.name],
            "kind": _kind(point, rungs),
            "by": point.drawn_by,
            "learned": not point.at_chance,
            "settings": ", ".join(f"{path}={setting(value)}" for path, value in point.settings.items()),
            **point.scores,
            **{("first", name): score for name, score in point.first.items()},
            **{path: point.settings.get(path) for path in searched},
        }
        rows.append(row)
    labels = {name: name if _tasks(objectives) > 1 else name.partition("@")[0] for name in objectives}
    return CandidateTable(rows, dict(searched), dict(objectives), labels)


def _tasks(objectives: Mapping[str, bool]) -> int:
    """Counts the tasks in the names of the objectives, METRIC@TASK."""
    return len({name.partition("@")[2] for name in objectives} - {""})


def _kind(point: "Point", rungs: int) -> str:
    """Returns the kind of a candidate, a key of `KINDS`."""
    if point.number is None:
        return "base"
    if point.is_arm:
        return "finalist"
    if point.rung < rungs - 1:
        return "stopped early"
    if point.at_chance:
        return "no better than chance"
    return "on the front" if point.on_front else "dominated"


def finite(row: Mapping[Any, Any], *columns: Any) -> bool:
    """Returns whether a row has a finite number in each of the `columns`."""
    return all(math.isfinite(row.get(column, math.nan)) for column in columns)


def by_objectives(
    table: CandidateTable, down: str, across: str, *, zoomed: bool = False
) -> tuple[Chart, pd.DataFrame] | None:
    """Draws every candidate by two objectives. A line joins the front of the two objectives.

    Args:
        table: The candidates.
        down: The objective on the vertical axis.
        across: The objective on the horizontal axis.
        zoomed: Whether the axes reach no farther than the base and the finalists.

    Returns:
        The chart and its data. None if no candidate has both objectives.
    """
    rows = [row for row in table.rows if finite(row, down, across)]
    if not rows:
        return None
    frame = pd.DataFrame(
        {
            "candidate": [row["name"] for row in rows],
            "what it is": [row["what"] for row in rows],
            "kind": [row["kind"] for row in rows],
            "size": [KINDS[row["kind"]][2] for row in rows],
            "drawn by": [row["by"] for row in rows],
            "settings": [row["settings"] for row in rows],
            "across": [row[across] for row in rows],
            "down": [row[down] for row in rows],
        }
    )
    signs = [-table.sign(name) for name in (across, down)]
    ended = frame[[row["kind"] != "stopped early" and row["learned"] for row in rows]]
    places = [(signs[0] * x, signs[1] * y) for x, y in zip(ended["across"], ended["down"], strict=True)]
    line = ended.iloc[front(places)].drop_duplicates(["across", "down"]).sort_values("across")[["across", "down"]]
    line = _to_the_edges(line, frame, table.objectives[across], table.objectives[down])
    arms = frame[frame["kind"].isin(["base", "finalist"])]
    seen = arms if zoomed and len(arms) else frame
    encoding = {
        "x": alt.X("across:Q", title=axis_title(table, across), scale=_scale(seen["across"], across)),
        "y": alt.Y("down:Q", title=axis_title(table, down), scale=_scale(seen["down"], down)),
    }
    present = [kind for kind in KINDS if kind in set(frame["kind"])]
    color, shape = (alt.Scale(domain=present, range=[KINDS[kind][i] for kind in present]) for i in range(2))
    points = (
        alt.Chart(frame[::-1])  # The finalists and the base come last, so that they are drawn over the rest.
        .mark_point(filled=True, opacity=0.9, stroke="white", strokeWidth=0.5, clip=True)
        .encode(
            **encoding,
            color=alt.Color("kind:N", scale=color, legend=legend("top")),
            shape=alt.Shape("kind:N", scale=shape, legend=legend("top")),
            size=alt.Size("size:Q", scale=None),
            tooltip=[
                "candidate:N", "what it is:N", "kind:N", "drawn by:N",
                alt.Tooltip("down:Q", title=table.labels[down], format=",.4~g"),
                alt.Tooltip("across:Q", title=table.labels[across], format=",.4~g"), "settings:N",
            ],
        )
    )  # fmt: skip
    step: Literal["step-before", "step-after"] = "step-before" if table.objectives[across] else "step-after"
    joined = (
        alt.Chart(line)
        .mark_line(interpolate=step, color=PALETTE[0], strokeWidth=2, opacity=0.7, clip=True)
        .encode(**encoding)
    )
    names = [
        alt.Chart(arms[[place == at for at in _label_places(arms, seen)]])
        .mark_text(align=place.align, dx=place.dx, dy=place.dy, color=UNDECIDED)
        .encode(**encoding, text="candidate:N")
        for place in PLACES
    ]
    return alt.layer(joined, points, *names).properties(height=380), frame.rename(
        columns={"across": across, "down": down}
    )


def _label_places(arms: pd.DataFrame, seen: pd.DataFrame) -> list[LabelPlace]:
    """Returns for each arm the first of `PLACES` at which its name covers no other name and no other arm.

    Args:
        arms: The arms to name.
        seen: The candidates that the axes reach to.
    """
    size = {"across": WIDTH, "down": -HEIGHT}
    pixels = {}
    for channel, length in size.items():
        low, high = seen[channel].min(), seen[channel].max()
        pixels[channel] = (arms[channel] - low) / ((high - low) or 1.0) * length
    points = list(zip(pixels["across"], pixels["down"], strict=True))
    boxes = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]  # The marks of the arms.
    chosen = []
    for (x, y), name in zip(points, arms["candidate"], strict=True):
        width = LETTER * len(name)
        for place in (*PLACES, PLACES[0]):  # Where every place is taken, names overlap.
            left = x + place.dx - (width if place.align == "right" else 0)
            box = (left, y + place.dy - 6, left + width, y + place.dy + 6)
            if not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in boxes):
                break
        boxes.append(box)
        chosen.append(place)
    return chosen


def _to_the_edges(line: pd.DataFrame, frame: pd.DataFrame, right: bool, up: bool) -> pd.DataFrame:
    """Prolongs the line of a front to the worst values of both objectives.

    Args:
        line: The points of the front.
        frame: The points of all candidates.
        right: Whether more of the objective on the horizontal axis is better.
        up: Whether more of the objective on the vertical axis is better.
    """
    if line.empty:
        return line
    worst_across = frame["across"].min() if right else frame["across"].max()
    worst_down = frame["down"].min() if up else frame["down"].max()
    best_across = line["across"].max() if right else line["across"].min()
    best_down = line["down"].max() if up else line["down"].min()
    ends = pd.DataFrame({"across": [best_across, worst_across], "down": [worst_down, best_down]})
    return pd.concat([ends[:1], line, ends[1:]] if not right else [ends[1:], line, ends[:1]])


def legend(orient: Literal["top", "bottom"]) -> alt.Legend:
    """Makes the legend of the kinds of candidates, with filled shapes."""
    return alt.Legend(orient=orient, title=None, symbolSize=90, symbolStrokeWidth=0)


def axis_title(table: CandidateTable, objective: str) -> str:
    """Writes the title of an objective's axis."""
    return f"{table.labels[objective]} ({'higher' if table.objectives[objective] else 'lower'} is better)"


def _scale(values: pd.Series, objective: str) -> alt.Scale:
    """Makes a scale for the values of an objective that are in view.

    The scale of a cost is logarithmic if the largest cost is over 20 times the smallest. Scores are linear: on a
    logarithmic axis, those between 0.8 and 1, which decide, would share a few pixels.
    """
    ends = [float(values.min()), float(values.max())]
    wide = objective in COSTS and values.min() > 0 and values.max() / values.min() > 20
    return alt.Scale(type="log" if wide else "linear", zero=False, nice=False, padding=15, domain=ends)
