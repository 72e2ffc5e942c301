"""Defines the columns of a report: each figure of an arm on a task, once for all forms of the report.

The terminal, Markdown, HTML, CSV, JSON, DataFrames, LaTeX and the dashboard read `COLUMNS`. To add a statistic, add a
field to `Row`, the code that computes it, and a column here.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from deltalab.statistics.intervals import Interval, Share
from deltalab.statistics.joint_test import Difference
from deltalab.study.answers.rows import Row, TaskTable
from deltalab.study.answers.wording import format_interval, format_p, verdict_text
from deltalab.study.specs.setting_text import settings_text

Group = Literal["name", "answer", "cost", "tuned", "files"]
"""The part of a table that a column belongs to. "name" is shown with every part; "files" only in files for programs."""


@dataclass(frozen=True)
class Column:
    """A figure of an arm on a task.

    Attributes:
        key: The name in CSV, JSON and DataFrames; "" if these formats store the text as
            several figures.
        head: The heading that readers see; "{metric}" stands for the table's metric.
        value: Returns the figure of a row: a number, a text, an interval or a dict; None if it is not known.
        text: Returns the figure of a row as text; "" if it is not known.
        group: The part of a table that the column belongs to.
        type: The type of the values, which is their type in a DataFrame.
        help: A sentence that explains the figure, shown when the mouse points at the heading.
        number: The printf format of the number in sortable tables; "" shows the text instead.
        bounds_head: The heading of the column that sortable tables have for the bounds of an interval.
        seldom: Whether a table leaves the column out if the figure is 0 or unknown in all of its rows.
    """

    key: str
    head: str
    value: Callable[[Row], Any]
    text: Callable[[Row], str]
    group: Group
    type: Any = str
    help: str = ""
    number: str = ""
    bounds_head: str = ""
    seldom: bool = False

    def head_of(self, table: TaskTable) -> str:
        """Returns the heading of the column in a table."""
        return self.head.format(metric=table.metric)


def _text(row: Row) -> str:
    """The empty text of a column that only files for programs have."""
    return ""


def _figure(key: str, head: str, form: str, kind: Any, help: str, number: str) -> Column:
    """The column of a cost, whose text `format` writes by the format string `form`."""

    def text(row: Row) -> str:
        value = getattr(row, key)
        return "" if value is None else format(value, form)

    seldom = key in ("kv_cache", "conv_cache")
    return Column(key, head, lambda row: getattr(row, key), text, "cost", kind, help, number, seldom=seldom)


def _in_files(key: str, kind: Any) -> Column:
    """A column that only files for programs have."""
    return Column(key, "", lambda row: getattr(row, key), _text, "files", kind)


def _seeds(row: Row) -> str:
    finished = row.score.n - row.score.missing
    seeds = f"{finished} of {row.score.n}" if row.score.missing else str(row.score.n)
    return f"{seeds}, {row.diverged} runs diverged" if row.diverged else seeds


def _tuned(row: Row) -> str:
    chose = f" ({row.chose} of {row.score.n} seeds)" if len(row.by_budget) > 1 else ""
    return settings_text(row.tuned, 3) + chose


COLUMNS: tuple[Column, ...] = (
    Column("arm", "arm", lambda row: row.arm, lambda row: row.arm, "name"),
    _in_files("is_base", bool),
    _in_files("is_reference", bool),
    Column("", "seeds", _seeds, _seeds, "answer", help="Seeds that finished, and runs that diverged."),
    Column(
        "score",
        "{metric}",
        lambda row: row.score,
        lambda row: format_interval(row.score),
        "answer",
        Interval,
        "The mean over seeds.",
        "%.4f",
        "95% interval",
    ),
    Column(
        "difference",
        "difference",
        lambda row: row.difference,
        lambda row: format_interval(row.difference, "+") if row.difference else "",
        "answer",
        Difference,
        "Arm minus base, or minus the reference in its place, paired by seed unless the base has more. "
        "The 95% interval holds jointly over the arms that are tested together.",
        "%+.4f",
        "interval",
    ),
    Column(
        "unbiased",
        "unbiased",
        lambda row: row.unbiased,
        lambda row: "" if row.unbiased is None else f"{row.unbiased:+.3f}",
        "answer",
        float,
        "The difference without the optimism of an early decision: as often too large as too small, and less precise.",
        "%+.4f",
        seldom=True,
    ),
    Column(
        "",
        "p",
        lambda row: row.difference.p if row.difference else None,
        lambda row: format_p(row.difference.p if row.difference else None),
        "answer",
        float,
        "Of no difference, exact, jointly over the arms.",
        "%.3f",
    ),
    Column(
        "verdict",
        "verdict",
        lambda row: row.verdict,
        verdict_text,
        "answer",
        help="What the test says: better, worse or equal by the margin, or what it leaves open.",
    ),
    Column(
        "iqm",
        "IQM",
        lambda row: row.iqm,
        lambda row: "" if row.iqm is None else f"{row.iqm:.3f}",
        "answer",
        float,
        "The mean without the least and the greatest quarter of the scores over tasks and seeds.",
        "%.4f",
        seldom=True,
    ),
    Column(
        "iqm_difference",
        "IQM difference",
        lambda row: row.iqm_difference,
        lambda row: format_interval(row.iqm_difference, "+") if row.iqm_difference else "",
        "answer",
        Difference,
        "IQM of the arm minus that of the base, or of the reference in its place. "
        "Its intervals hold jointly over the arms, apart from the others.",
        "%+.4f",
        "interval of the IQM difference",
        seldom=True,
    ),
    _in_files("diverged", int),
    _in_files("learned", Share),
    _in_files("seconds", float),
    _figure(
        "microseconds_per_token",
        "us/token",
        ".3g",
        float,
        "Time of a trained token, on a CPU that of its core.",
        "%.3g",
    ),
    _figure("flops_per_token", "flops/token", ",.0f", float, "Operations of matrix products, forward.", "localized"),
    _figure("recurrent_state", "state", ",", int, "Elements of the recurrent state.", "localized"),
    _figure("kv_cache", "KV cache", ",", int, "Elements of the memory that grow with the sequence.", "localized"),
    _figure("conv_cache", "conv cache", ",", int, "Elements held for the convolution, beside the state.", "localized"),
    _in_files("state_size", int),
    _figure("parameters", "parameters", ",", int, "Trained numbers of the model.", "localized"),
    _in_files("dead_parameters", int),
    Column("tuned", "tuned", lambda row: row.tuned, _tuned, "tuned", dict, "The best values on validation."),
    Column(
        "one_setting",
        "{metric} of these values",
        lambda row: row.one_setting,
        lambda row: format_interval(row.one_setting) if row.one_setting else "",
        "tuned",
        Interval,
        "The mean over seeds if all seeds take the tuned values.",
        "%.4f",
        "95% interval of these values",
        seldom=True,
    ),
    _in_files("chose", int),
    _in_files("by_budget", dict),
    _in_files("by_seed", dict),
    _in_files("scores", dict),
    _in_files("seeds_needed", int),
    _in_files("metrics", dict),
)


def columns(table: TaskTable, *groups: Group) -> list[Column]:
    """Returns the columns of the groups that a table has, in order; without groups, all columns that readers see.

    A table over tasks has no costs and no tuned values, which are those of a trial on one task.
    """
    seen = {"name", "answer"} if table.over else {"name", "answer", "cost", "tuned"}
    chosen = [column for column in COLUMNS if column.group in (seen.intersection(groups) if groups else seen)]
    return [column for column in chosen if not column.seldom or any(map(column.value, table.rows))]


def figures(row: Row) -> dict[str, Any]:
    """Returns every figure of a row by its column's key, for programs."""
    return {column.key: column.value(row) for column in COLUMNS if column.key}


def headers(table: TaskTable, chosen: Iterable[Column] | None = None) -> list[str]:
    """Returns the headings of the chosen columns; None chooses all columns that readers see."""
    return [column.head_of(table) for column in (columns(table) if chosen is None else chosen)]


def cells(row: Row, chosen: Iterable[Column]) -> list[str]:
    """Returns the text of a row in each of the columns; "" for a figure that is not known."""
    return [column.text(row) for column in chosen]
