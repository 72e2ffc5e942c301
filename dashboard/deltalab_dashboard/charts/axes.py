"""The axes of charts over settings. An axis is a linear or logarithmic range, or shows a few values side by side."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import altair as alt

from deltalab.study.specs.sections.search_space import Search
from deltalab_dashboard.text import setting

FEW = 8
"""If a setting has at most this many whole numbers, they stand side by side. More whole numbers lie on a range."""


@dataclass(frozen=True)
class Axis:
    """An axis on which the values of a setting lie.

    Attributes:
        words: The texts of the values that stand side by side. Empty if the values lie on a range.
        low: The low end of the range.
        high: The high end of the range.
        logarithmic: Whether the range is logarithmic.
    """

    words: tuple[str, ...]
    low: float = 0.0
    high: float = 1.0
    logarithmic: bool = False

    def text(self, value: Any) -> str:
        """Writes a value as the axis shows it.

        Examples:
            >>> Axis(("comba",)).text({"name": "comba"}), Axis((), 0, 1).text(0.12345), Axis((), 0, 1).text(4096.0)
            ('comba', '0.123', '4,096')
        """
        if self.words:
            return setting(value)
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    def share(self, value: Any) -> float:
        """Returns the place of a value on the axis, from 0 at the low end to 1 at the high end.

        Examples:
            >>> Axis((), 0.01, 1, logarithmic=True).share(0.1), Axis(("a", "b", "c")).share("b")
            (0.5, 0.5)
        """
        if self.words:
            return (self.words.index(self.text(value)) + 0.5) / len(self.words)
        if self.low == self.high:
            return 0.5
        low, high, at = map(self._scaled, (self.low, self.high, value))
        return (at - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Returns the ticks, each with its `share` and its label.

        Each value that stands side by side with others has a tick. A range has a tick at each of its ends.
        """
        if self.words:
            return [((at + 0.5) / len(self.words), word) for at, word in enumerate(self.words)]
        return [(self.share(end), self.text(end)) for end in dict.fromkeys((self.low, self.high))]

    def cell(self, value: Any, count: int) -> tuple[Any, Any]:
        """Returns the bounds of the part of the range in which a value lies.

        If the values stand side by side, both bounds are the value's text.

        Args:
            value: The value.
            count: The number of equal parts into which the range is divided.

        Examples:
            >>> Axis((), 0.01, 100, logarithmic=True).cell(3, 4)
            (1.0, 10.0)
        """
        if self.words:
            return self.text(value), self.text(value)
        at = min(int(self.share(value) * count), count - 1)
        return self._at(at / count), self._at((at + 1) / count)

    def mean(self, values: Sequence[Any]) -> Any:
        """Returns the mean of values that lie in the same part of the range.

        On a logarithmic axis, the mean is geometric. If values stand side by side, the values of one part are equal,
        and their text is returned.

        Examples:
            >>> round(Axis((), 0.01, 100, logarithmic=True).mean([1.0, 100.0]), 6), Axis((), 0, 4).mean([1.0, 4.0])
            (10.0, 2.5)
        """
        if self.words:
            return self.text(values[0])
        return math.exp(fmean(map(math.log, values))) if self.logarithmic else fmean(values)

    def encoding(self, field: str, title: str, *, vertical: bool = False) -> Any:
        """Returns the encoding of a chart's channel x, or of its channel y if `vertical`."""
        channel: Any = alt.Y if vertical else alt.X
        if self.words:
            label = alt.Axis(labelAngle=0, labelLimit=260)
            return channel(f"{field}:N", title=title, scale=alt.Scale(domain=list(self.words)), axis=label)
        scale = alt.Scale(type="log" if self.logarithmic else "linear", zero=False, nice=False, padding=15)
        return channel(f"{field}:Q", title=title, scale=scale)

    def _scaled(self, value: float) -> float:
        """Returns the logarithm of a value if the range is logarithmic, else the value."""
        return math.log(value) if self.logarithmic else value

    def _at(self, share: float) -> float:
        """Returns the value at a place of the range, given as `share` returns it."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        at = low + share * (high - low)
        return float(f"{math.exp(at) if self.logarithmic else at:.6g}")


def axis(values: Sequence[Any], search: Search | None) -> Axis:
    """Makes the axis on which the given values lie.

    Args:
        values: The values of a setting, or the scores of candidates.
        search: The search space of the setting. None if the values are scores.

    Examples:
        >>> axis([1, 4, 2], Search(integers=(1, 4)))
        Axis(words=('1', '2', '4'), low=0.0, high=1.0, logarithmic=False)
        >>> axis([0.01, 0.1], Search(log_uniform=(1e-3, 1e-1)))
        Axis(words=(), low=0.01, high=0.1, logarithmic=True)
    """
    different = list({setting(value): value for value in values}.values())
    whole = search is not None and search.integers is not None
    if search is not None and (search.choice or search.pattern or (whole and len(different) <= FEW)):
        order = {setting(value): at for at, value in enumerate(search.choice or ())}
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in different)
        key = None if numbers else lambda value: order.get(setting(value), len(order))
        return Axis(tuple(map(setting, sorted(different, key=key))))
    low, high = min(values), max(values)
    return Axis((), low, high, search is not None and search.log_uniform is not None)
