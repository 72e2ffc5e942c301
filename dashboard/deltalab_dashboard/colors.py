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

PAGES = {"light": "#ffffff", "dark": "#171614"}
"""The background of a page, by Streamlit's name of its theme."""
READABLE = 4.5
"""The contrast that WCAG 2 asks of text."""


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


def text_color(color: str, theme: str) -> str:
    """Returns a colour in which text can be read on the page: with as little black or white in it as that takes.

    Args:
        color: The colour, as #rrggbb.
        theme: A key of `PAGES`.

    Examples:
        >>> text_color("#007733", "light"), text_color("#007733", "dark")
        ('#007733', '#30915a')
    """
    page = PAGES[theme]
    end = 255 if _luminance(page) < 0.5 else 0
    shares = (
        "#" + "".join(f"{round(c + (end - c) * mixed / 100):02x}" for c in bytes.fromhex(color[1:]))
        for mixed in range(101)
    )
    return next(shade for shade in shares if contrast(shade, page) >= READABLE)


def contrast(a: str, b: str) -> float:
    """Returns the contrast of two colours, as WCAG 2 defines it: from 1 to 21."""
    dark, light = sorted(map(_luminance, (a, b)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: str) -> float:
    """Returns the relative luminance of a colour, from 0 to 1."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (b / 255 for b in bytes.fromhex(color[1:]))
    ]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
