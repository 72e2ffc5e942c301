"""Colours and shapes that colour-blind readers can tell apart. No page tells things apart by colour alone."""

from collections.abc import Sequence

BETTER, WORSE, UNDECIDED = "#1f6fd6", "#c25700", "#6b7280"
"""Blue, orange and grey: readable on a light and a dark page."""
ACCENT = "#aa0088"
"""What a chart points out, such as an optimum or an edge."""
BASE = "#6b7280"
"""The base of a study, which is drawn dashed."""
OTHERS = "#b4bac4"
"""The arms that are not highlighted, where there are more than `PALETTE` has colours for."""
# Any two are at least 13 apart (CIEDE2000) under deuteranopia and protanopia, and 21 in normal vision.
PALETTE = (
    "#3377dd", "#bb5500", "#22bb99", "#cc3366", "#2200ff", "#bbaa11", "#006644", "#dd99cc", "#008899", "#554477",
)  # fmt: skip

COLORS = {"better": BETTER, "worse": WORSE, "undecided": UNDECIDED}
"""A verdict's colour, by `kind`."""
SHAPES = {"better": "triangle-up", "worse": "triangle-down", "undecided": "circle"}
"""A verdict's shape in a chart, by `kind`."""
MARKS = {"better": "▲", "worse": "▼", "undecided": "○"}
"""A verdict's shape in text, by `kind`."""


def kind(verdict: str) -> str:
    """The key of a verdict in `COLORS`, `SHAPES` and `MARKS`.

    >>> kind("worse"), kind("no difference found at this budget")
    ('worse', 'undecided')
    """
    return verdict if verdict in COLORS else "undecided"


def arms(names: Sequence[str], base: str | None, highlighted: Sequence[str] = ()) -> dict[str, str]:
    """The colour of each arm.

    names: all arms of the study, whatever is filtered out, so that an arm keeps its colour. base: its name, which
    gets `BASE`. highlighted: the arms in colour where more than ten stand beside the base; the others get `OTHERS`.

    >>> arms(["base", "a", "b"], "base")
    {'base': '#6b7280', 'a': '#3377dd', 'b': '#bb5500'}
    >>> many = [f"arm_{i}" for i in range(12)]
    >>> arms(many, None, ["arm_11"])["arm_0"], arms(many, None, ["arm_11"])["arm_11"]
    ('#b4bac4', '#bb5500')
    """
    others = [name for name in names if name != base]
    found = dict.fromkeys(names, OTHERS)
    if base is not None:
        found[base] = BASE
    colored = others if len(others) <= len(PALETTE) else [name for name in others if name in highlighted]
    for name in colored[: len(PALETTE)]:
        # An arm's place in the study gives its colour; where another has it already, the next that is free.
        at = others.index(name)
        turns = (PALETTE[(at + i) % len(PALETTE)] for i in range(len(PALETTE)))
        found[name] = next(color for color in turns if color not in found.values())
    return found
