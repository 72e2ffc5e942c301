"""Colours and shapes that colour-blind readers can tell apart. No page relies on colour alone."""

from collections.abc import Sequence

BETTER, WORSE, UNDECIDED = "#1f6fd6", "#c25700", "#6b7280"
"""Blue, orange and grey. Text in these colours can be read on a light and on a dark page."""
ACCENT = "#c026a0"
"""The colour of the marks that a chart emphasizes, such as the finalists of a search."""
BASE = "#6b7280"
"""The colour of a study's base. Charts draw the base as a dashed line."""
OTHERS = "#868d9a"
"""The colour of arms that are not highlighted, in a study with more arms than `PALETTE` has colours."""
PALETTE = (
    "#0099ee", "#cc0000", "#bb8800", "#007733", "#8c4a9e", "#669988", "#6644ff", "#dd5566", "#9988aa", "#bb2266",
)  # fmt: skip
"""The colours of arms.

Each has a contrast of at least 3 on a white and on a dark page. Any two, and the base's, differ by at least 11
(CIEDE2000) under deuteranopia and protanopia, and by at least 15 in normal vision.
"""

COLORS = {"better": BETTER, "worse": WORSE, "equal": UNDECIDED, "undecided": UNDECIDED}
"""The colour of a verdict. The keys are the results of `kind`.

Colour-blind readers tell no fourth colour from these on both a light and a dark page, so that "equal" has its shape
alone.
"""
SHAPES = {"better": "triangle-up", "worse": "triangle-down", "equal": "square", "undecided": "circle"}
"""The shape of a verdict in a chart. The keys are the results of `kind`."""
MARKS = {"better": "▲", "worse": "▼", "equal": "■", "undecided": "○"}
"""The character that marks a verdict in text. The keys are the results of `kind`."""


def kind(verdict: str) -> str:
    """Returns the key of a verdict in `COLORS`, `SHAPES` and `MARKS`.

    Examples:
        >>> kind("worse"), kind("equal or better")
        ('worse', 'undecided')
    """
    return verdict if verdict in COLORS else "undecided"


def arm_colors(names: Sequence[str], base: str | None, highlighted: Sequence[str] = ()) -> dict[str, str]:
    """Returns the colour of each arm.

    Args:
        names: All arms of the study. An arm keeps its colour only if arms that the page leaves out are listed, too.
        base: The name of the base, which gets the colour `BASE`. None if no arm is the base.
        highlighted: The arms that get a colour of `PALETTE` if more than ten arms stand beside the base. The arms that
            are not highlighted then get the colour `OTHERS`.

    Examples:
        >>> arm_colors(["base", "a", "b"], "base")
        {'base': '#6b7280', 'a': '#0099ee', 'b': '#cc0000'}
        >>> many = [f"arm_{i}" for i in range(12)]
        >>> arm_colors(many, None, ["arm_11"])["arm_0"], arm_colors(many, None, ["arm_11"])["arm_11"]
        ('#868d9a', '#cc0000')
    """
    others = [name for name in names if name != base]
    color_of = dict.fromkeys(names, OTHERS)
    if base is not None:
        color_of[base] = BASE
    colored = others if len(others) <= len(PALETTE) else [name for name in others if name in highlighted]
    for name in colored[: len(PALETTE)]:
        # An arm's place in the study gives its colour. If another arm already has that colour, the arm gets the next
        # free colour.
        at = others.index(name)
        turns = (PALETTE[(at + i) % len(PALETTE)] for i in range(len(PALETTE)))
        color_of[name] = next(color for color in turns if color not in color_of.values())
    return color_of
