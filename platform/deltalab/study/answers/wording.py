"""Writes the numbers of an answer as text."""

import math

from deltalab.statistics.intervals import Interval
from deltalab.statistics.joint_test import Difference
from deltalab.study.answers.rows import Row


def format_interval(interval: Interval | Difference, sign: str = "") -> str:
    """Returns a mean and its bounds as "mean [low, high]"; "" if the mean is not known.

    Args:
        interval: The mean with its bounds, which are left out if they are not finite.
        sign: "+" writes a sign before positive numbers, too; "" only before negative ones.
    """
    if not math.isfinite(interval.mean):
        return ""
    bounds = f" [{interval.low:{sign}.3f}, {interval.high:{sign}.3f}]" if math.isfinite(interval.low) else ""
    return f"{interval.mean:{sign}.3f}{bounds}"


def format_metric(interval: Interval) -> str:
    """Returns a mean of any size and its bounds, each to four digits.

    Examples:
        >>> format_metric(Interval(0.0012345, 0.001, 0.0014321, 8)), format_metric(Interval(3.5, math.nan, math.nan, 1))
        ('0.001234 [0.001000, 0.001432]', '3.500')
    """
    mean, low, high = (f"{x:#.4g}".rstrip(".") for x in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]" if math.isfinite(interval.low) else mean


def verdict_text(row: Row) -> str:
    """Returns a row's verdict; "better by over 0.05" if the interval lies beyond a margin of 0.05, too."""
    margin = row.difference.margin if row.difference and row.difference.is_beyond else 0.0
    return f"{row.verdict} by over {margin:g}" if margin else row.verdict


def format_p(p: float | None) -> str:
    """Returns a p-value as text; "" if it is not known."""
    if p is None or not math.isfinite(p):
        return ""
    return "<0.001" if p < 0.001 else f"{p:.3f}"
