"""Draws the answer at a glance as HTML: a row for each arm, and a column for each task with the arm's interval."""

import math
import statistics
from html import escape
from typing import NamedTuple, Self

from deltalab.study.answers.answer import Answer
from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.answers.wording import format_interval, format_p
from deltalab.study.reports.sentence import short_verdict
from deltalab.study.specs.setting_paths import training_part

VERDICTS = {"better": ("▲", "#1f6fd6"), "worse": ("▼", "#c25700"), "equal": ("■", "#6b7280")}
"""The mark and the colour of a decided verdict. Colour-blind readers tell blue from orange."""
UNDECIDED = ("○", "#6b7280")
"""The mark and the colour of any other verdict of a compared arm."""
LEGEND = (
    "Line: the interval, which holds jointly over the arms. Small: each seed. Band: what the margin counts as equal. "
    "Arms far beyond the others are cut off at the end of the axis."
)
"""Explains the drawing."""
FARTHEST = 5.0
"""How many times as far as the median arm an axis reaches."""
ROOM = 0.04
"""The share of an axis that is left free at each end."""
SHORT = 16
"""The most characters of a name that is never broken."""
RATIOS = (
    ("time", "microseconds_per_token"),
    ("flops", "flops_per_token"),
    ("state", "state_size"),
    ("parameters", "parameters"),
)
"""The costs in the last column, each with its attribute of a row."""
APART = 0.05
"""The share by which a cost must differ from the reference's to be shown."""

STYLE = """
.forest { width: 100%; border-collapse: collapse; line-height: 1.3; }
.forest th, .forest td { text-align: left; padding: .35rem .8rem .35rem 0; vertical-align: top; font-weight: 400;
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, .25); }
.forest thead th { vertical-align: bottom; font-weight: 600; }
.forest tbody th { font-weight: 600; overflow-wrap: break-word; }
.forest .plot { position: relative; display: block; height: 1.35rem; min-width: 6rem; }
.forest .plot i { position: absolute; display: block; }
.forest .margin { top: 0; bottom: 0; background: rgba(128, 128, 128, .18); }
.forest .zero { top: 0; bottom: 0; border-left: 1px dashed #6b7280; }
.forest .interval { top: .42rem; height: 3px; }
.forest .mean { top: 0; width: 1em; margin-left: -.5em; text-align: center; font-style: normal; line-height: 1; }
.forest .seed { top: 1.05rem; width: 5px; height: 5px; margin-left: -2.5px; border-radius: 50%; opacity: .6; }
.forest .figures, .forest .ends { font-size: .85em; font-variant-numeric: tabular-nums; }
.forest .whole { white-space: nowrap; }
.forest th[data-whole] { white-space: nowrap; padding-right: 1.2rem; }
.forest td:last-child { min-width: 6.5rem; }
.forest-frame { overflow-x: auto; }
.forest .ends { display: flex; justify-content: space-between; gap: .5rem; }
@media (max-width: 640px) {
  .forest thead { display: none; }
  .forest tr { display: block; padding: .6rem 0; border-bottom: 2px solid rgba(128, 128, 128, .4); }
  .forest th, .forest td { display: block; border: 0; padding: .15rem 0; }
  .forest td[data-task]::before { content: attr(data-task) "\\00a0 "; font-size: .85em; }
  .forest .plot { margin: 0 .6rem; }
}
"""


class Axis(NamedTuple):
    """The range of differences that a column shows.

    Attributes:
        low: The difference at the left end.
        high: The difference at the right end.
    """

    low: float
    high: float

    @classmethod
    def of(cls, table: TaskTable) -> Self:
        """Returns the axis that has 0, the margin, all means, seeds and finite intervals of a table.

        An arm that reaches farther than `FARTHEST` times the median arm is cut off, so that the others can be seen.
        """
        by_arm = [
            [end for end in (each.mean, each.low, each.high, *row.by_seed.values()) if math.isfinite(end)]
            for row in table.rows
            if (each := row.difference) is not None and each.n
        ]
        reaches = [max(map(abs, ends)) for ends in by_arm if ends]
        most = max(FARTHEST * statistics.median(reaches), table.margin) if reaches else 0.0
        ends = [min(max(end, -most), most) for ends in by_arm for end in ends] + [0.0, -table.margin, table.margin]
        width = max(ends) - min(ends) or 1.0
        return cls(min(ends) - ROOM * width, max(ends) + ROOM * width)

    def place(self, difference: float) -> float:
        """Returns the place of a difference in percent of the axis, cut off at the ends."""
        return 100 * min(max((difference - self.low) / (self.high - self.low), 0.0), 1.0)


def forest(answer: Answer) -> str:
    """Returns the forest as HTML without its `STYLE`; "" if no arm was compared.

    The arms stand in the order of their effect in the first column, which is that of the means over tasks if there are
    several. Each cell has the difference to the base or the other reference, its joint interval, p and each seed.
    """
    tables = answer.all_tables
    if not any(row.difference is not None and row.difference.n for table in tables for row in table.rows):
        return ""
    axes = [Axis.of(table) for table in tables]
    lines = ['<div class="forest-frame" tabindex="0" role="region" aria-label="Arms by tasks">']
    lines += ['<table class="forest"><thead><tr><th scope="col">arm</th>']
    lines += [_head(table, axis) for table, axis in zip(tables, axes, strict=True)]
    lines += ['<th scope="col">cost</th></tr></thead><tbody>']
    for arm in _arms(tables[0]):
        rows = [next(row for row in table.rows if row.arm == arm) for table in tables]
        is_short = len(arm) <= SHORT
        name = escape(arm) if is_short else escape(arm).replace("_", "_<wbr>")
        lines.append(f'<tr><th scope="row"{" data-whole" if is_short else ""}>{name}</th>')
        for row, table, axis in zip(rows, tables, axes, strict=True):
            lines.append(f'<td data-task="{escape(_label(table))}">{_cell(row, table, axis)}</td>')
        costs = escape(_costs(rows, tables))
        lines.append(f'<td class="figures"{" data-task=cost" if costs else ""}>{costs}</td></tr>')
    return "\n".join([*lines, "</tbody></table></div>"])


def _arms(table: TaskTable) -> list[str]:
    """The reference, then the arms by their effect, the best first; arms without a difference come last."""

    def order(row: Row) -> tuple[int, float]:
        if row.is_reference:
            return 0, 0.0
        known = row.difference is not None and math.isfinite(row.difference.mean)
        return (1, -table.sign * row.difference.mean) if known and row.difference else (2, 0.0)

    return [row.arm for row in sorted(table.rows, key=order)]


def _label(table: TaskTable) -> str:
    return f"over {len(table.over)} tasks: {table.metric}" if table.over else f"{table.trained}: {table.metric}"


def _head(table: TaskTable, axis: Axis) -> str:
    better = "higher is better →" if table.maximize else "← lower is better"
    return (
        f'<th scope="col">{escape(_label(table))}<span class="ends"><span>{axis.low:+.2g}</span>'
        f"<span>{better}</span><span>{axis.high:+.2g}</span></span></th>"
    )


def _cell(row: Row, table: TaskTable, axis: Axis) -> str:
    """The cell of an arm on a task: its interval as a line, and below it the same in figures."""
    score = row.score
    lost = f"; {score.missing} of {score.n} seeds did not finish" if score.missing else ""
    if row.is_reference:
        return f'{_plot(_zero(axis))}<span class="figures">{escape(format_interval(score) + lost)}</span>'
    difference = row.difference
    if difference is None or not difference.n or not math.isfinite(difference.mean):
        return f'<span class="figures">{escape(short_verdict(row))}</span>'
    mark, color = VERDICTS.get(row.verdict, UNDECIDED)
    parts = [f'<i class="margin" style="{_span(axis, -table.margin, table.margin)}"></i>'] if table.margin else []
    parts.append(_zero(axis))
    if math.isfinite(difference.low):
        span = _span(axis, difference.low, difference.high)
        parts.append(f'<i class="interval" style="{span}; background: {color}"></i>')
    for seed in row.by_seed.values():
        if math.isfinite(seed):
            parts.append(f'<i class="seed" style="left: {axis.place(seed):.2f}%; background: {color}"></i>')
    parts.append(f'<i class="mean" style="left: {axis.place(difference.mean):.2f}%; color: {color}">{mark}</i>')
    said = escape(short_verdict(row))
    is_paired = not table.over and difference.of_base is None
    is_of_some = is_paired and len({difference.n, score.n, table.reference.score.n}) > 1
    pairs = f"; over the {difference.n} seeds of both" if is_of_some else ""
    figures = (escape(format_interval(difference, "+")), f"p {format_p(difference.p)}")
    whole = ", ".join(f'<span class="whole">{figure}</span>' for figure in figures)
    return f'{_plot(*parts)}<span class="figures">{mark} {said}, {whole}{lost}{pairs}</span>'


def _plot(*parts: str) -> str:
    return f'<span class="plot" aria-hidden="true">{"".join(parts)}</span>'


def _zero(axis: Axis) -> str:
    return f'<i class="zero" style="left: {axis.place(0.0):.2f}%"></i>'


def _span(axis: Axis, low: float, high: float) -> str:
    left = axis.place(low)
    return f"left: {left:.2f}%; width: {max(axis.place(high) - left, 0.3):.2f}%"


def _costs(rows: list[Row], tables: list[TaskTable]) -> str:
    """What an arm costs beside the reference, and the training that it chose, in a line.

    Chosen settings of a rule make the arm what it is, and are listed where the arms are. The costs are those of the
    first task that has them; a cost of nearly the reference's is left out.
    """
    texts: list[str] = []
    for row, table in zip(rows, tables, strict=True):
        if table.over or row.is_reference:
            continue
        for name, key in RATIOS:
            own, reference = getattr(row, key), getattr(table.reference, key)
            if own and reference and abs(own / reference - 1) > APART and not any(name in text for text in texts):
                texts.append(f"{own / reference:.2g}× {name}")
    chosen: dict[str, list[str]] = {}
    for row in rows:
        for key, value in training_part(row.tuned).items():
            text = f"{value:.2g}" if isinstance(value, float) else str(value)
            if text not in chosen.setdefault(key, []):
                chosen[key].append(text)
    texts += [f"{key.removeprefix('train.')} {', '.join(values)}" for key, values in chosen.items()]
    return "; ".join(texts)
