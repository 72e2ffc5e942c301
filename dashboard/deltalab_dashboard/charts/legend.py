"""Lays out the legend below a chart, which is as wide as the page."""

from collections.abc import Iterable
from typing import TypeAlias

import altair as alt

Lines: TypeAlias = alt.LayerChart | alt.FacetChart
"""What `alt.layer` returns."""
LETTER = 7
"""About how many pixels a letter of a name is wide."""
AXIS, WIDE = 70, 800
"""About how many pixels the axis takes beside the legend, and how many a chart in a file has."""


def legend_columns(names: Iterable[str]) -> alt.ExprRef:
    """Returns how many of these names stand side by side in the legend: six, or as many as the page has room for.

    Vega cuts off a legend that is wider than the chart, and narrows the chart for it.
    """
    entry = 30 + LETTER * max(map(len, names), default=0)
    # Without a page, as in a file, there is no container.
    return alt.ExprRef(f"max(1, min(6, floor(((containerSize()[0] || {WIDE}) - {AXIS}) / {entry})))")


def beside_legends(figure: Lines, height: int) -> Lines:
    """Returns a chart whose lines have this height in pixels, and whose legends come on top of it.

    Otherwise Streamlit fits all into one height, and a long legend on a phone leaves the lines no room.
    """
    fit: Lines = figure.properties(height=height, autosize=alt.AutoSizeParams(type="fit-x", contains="padding"))
    return fit
