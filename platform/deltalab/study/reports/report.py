"""Shows a study's answer: as tables on a terminal, as Markdown, CSV or JSON."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from deltalab.errors import unknown
from deltalab.reading import pairs
from deltalab.store import Store
from deltalab.store.models import Stage
from deltalab.store.trainings import TrainingRow
from deltalab.study.answers.answer import (
    NO_DIFFERENCE,
    Answer,
    Failure,
    Row,
    TaskTable,
    answer,
    format_interval,
    format_p,
    format_values,
)
from deltalab.study.answers.ladder_trends import Ladder
from deltalab.study.statistics.intervals import Interval
from deltalab.study.statistics.joint_test import UNKNOWN, Difference

if TYPE_CHECKING:
    import pandas as pd

    from deltalab.study.reports.search_sections import Section

Part = Literal["arms", "ladders", "trainings"]
"""A table of a report's figures: a line per task and arm; per ladder, arm and size; or per training."""

STYLE = {"better": "green", "worse": "red", "failed": "red", "diverged": "red"}
SHORT = 8
"""Rows of a search's tables on a terminal."""
ONE_TABLE = 120
"""Columns of a terminal that shows the answer and its costs in one table; a narrower one shows two."""
SHORT_VERDICT = "no diff."
SHORTEST_NAME = 8
"""Columns that are left to a name, or to a word among the tuned values, before it is folded."""
TRAININGS = "Trainings of exported folders"
TRAINING_HEADERS = (
    "training", "arm", "rule", "parameters", "steps", "tokens", "train loss", "validation loss", "tokens/s",
    "evaluations",
)  # fmt: skip
DTYPES: dict[Any, str] = {
    int: "Int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
    bool: "bool",
}
"""pandas' type for the figures of a dataclass, by their annotation."""
# Positions in a row's `cells`.
ARM, METRIC, DIFFERENCE, VERDICT, TUNED = 0, 2, 3, 5, 10
ANSWER, COSTS = (0, 1, 2, 3, 4, 5), (0, 6, 7, 8, 9, 10)


class Report(Answer):
    """An answer that can be shown; `console.print(report)` fits it to the console's width."""

    @property
    def title(self) -> str:
        profile = f"profile {self.profile}" if self.profile else "default profile"
        state = self.state if self.state in ("done", "failed") else f"{self.state}: verdicts may change"
        given = f", with {pairs(self.overrides)}" if self.overrides else ""
        return f"{self.study}, {profile}{given}, id {self.study_id} ({state})"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        for warning in self.warnings:
            yield Text(f"! {warning}", style="yellow")
        for table in self._shown:
            yield Text(f"\n{caption(table)}")
            for warning in table.warnings:
                yield Text(f"! {warning}", style="yellow")
            if options.max_width >= ONE_TABLE:
                grids = [_grid(table, range(TUNED + 1), options.max_width)]
            else:
                grids = [_grid(table, ANSWER, options.max_width), _grid(table, COSTS, options.max_width)]
            yield grids[0]
            for grid in grids[1:]:
                yield Text("")
                yield grid
            for note in table.notes:
                yield Text(f"- {note}")
        for ladder in self.ladders:
            yield Text(f"\n{ladder_caption(ladder)}")
            wide = options.max_width >= ONE_TABLE
            grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
            for header in ladder_headers(ladder) if wide else ("arm", "size", "difference"):
                grid.add_column(Text(header), overflow="fold")
            for shown in ladder_cells(ladder) if wide else _ladder_lines(ladder):
                grid.add_row(*(Text(cell.replace(" [", "\n[") if wide else cell) for cell in shown))
            yield grid
            for note in ladder_notes(ladder):
                yield Text(f"- {note}")
        for section in self._sections(SHORT):
            yield Text(f"\n{section.title}")
            if section.rows:
                yield _section_grid(section.headers, section.rows)
            for line in section.notes:
                yield Text(f"- {line}")
        if self.search:
            yield Text("")
        for line in (*failure_lines(self.failures), *self.notes):
            yield Text(f"- {line}")
        if self.trainings:
            yield Text(f"\n{TRAININGS}")
            yield _training_grid(self.trainings)
            for row in self.trainings:
                if row.evaluations:
                    yield Text(f"- {row.name}: {training_cells(row)[-1]}")

    @property
    def _shown(self) -> list[TaskTable]:
        """The tables, with the training alone of what a search's arms tuned: a line of its own says what each is."""
        if self.search is None:
            return self.tables

        def training(row: Row) -> Row:
            return replace(row, tuned={path: value for path, value in row.tuned.items() if path.startswith("train.")})

        return [replace(table, rows=[*map(training, table.rows)]) for table in self.tables]

    def _sections(self, most: int | None = None) -> "list[Section]":
        if self.search is None:
            return []
        from deltalab.study.reports.search_sections import sections  # It brings Optuna, which takes a second to load.

        return sections(self.search, most)

    def to_markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        lines += [*(f"- **{warning}**" for warning in self.warnings), *([""] if self.warnings else [])]
        for table in self._shown:
            names = headers(table)
            lines += [f"### {caption(table)}", ""]
            lines += [*(f"- **{warning}**" for warning in table.warnings), *([""] if table.warnings else [])]
            lines += [_markdown(names), _markdown(["---"] * len(names))]
            lines += [_markdown(cells(row)) for row in table.rows]
            lines += ["", *(f"- {note}" for note in table.notes), *([""] if table.notes else [])]
        for ladder in self.ladders:
            names = ladder_headers(ladder)
            lines += [f"### {ladder_caption(ladder)}", "", _markdown(names), _markdown(["---"] * len(names))]
            lines += [_markdown(row) for row in ladder_cells(ladder)]
            lines += ["", *(f"- {note}" for note in ladder_notes(ladder)), ""]
        for section in self._sections():
            lines += [f"### {section.title}", ""]
            if section.rows:
                lines += [_markdown(section.headers), _markdown(["---"] * len(section.headers))]
                lines += [*map(_markdown, section.rows), ""]
            lines += [*(f"- {line}" for line in section.notes), ""]
        lines += [f"- {line}" for line in (*failure_lines(self.failures), *self.notes)]
        if self.trainings:
            lines += ["", f"### {TRAININGS}", ""]
            lines += [_markdown(TRAINING_HEADERS), _markdown(["---"] * len(TRAINING_HEADERS))]
            lines += [_markdown(training_cells(row)) for row in self.trainings]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Every figure; null where one is not defined."""
        return json.dumps(_without_nan(asdict(self)), indent=2, allow_nan=False, default=datetime.isoformat)

    def to_csv(self) -> str:
        """A line per task and arm; an empty field where a figure is not defined.

        Where there are ladders, an empty line and a table with a line per arm and size follow; where there are
        trainings, another with a line per training.
        """
        parts = []
        for lines in filter(None, (self._lines("arms"), self._lines("ladders"), self._lines("trainings"))):
            out = io.StringIO()
            writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows({key: _field(value) for key, value in line.items()} for line in lines)
            parts.append(out.getvalue())
        return "\n".join(parts)

    def to_frame(self, part: Part = "arms") -> "pd.DataFrame":
        """The figures as a pandas DataFrame: the lines and columns of `to_csv`, as numbers, dicts and lists.

        part: "arms" has a line per task and arm, "ladders" one per arm and size, "trainings" one per training. Whole
        numbers have the type Int64, which knows missing ones; other figures are float64, NaN where not defined. The
        frame is empty where the report has no such part.
        Raises `InputError` for another part.
        """
        import pandas as pd  # It takes half a second to load.

        lines = self._lines(part)
        dtypes = {column: dtype for column, dtype in _dtypes().items() if lines and column in lines[0]}
        return pd.DataFrame(lines).astype(dtypes)

    def _lines(self, part: Part) -> list[dict[str, Any]]:
        if part == "arms":
            return [_flat(table, row) for table in self.tables for row in table.rows]
        if part == "ladders":
            return [line for ladder in self.ladders for line in _flat_ladder(ladder)]
        if part == "trainings":
            return [_flat_training(row) for row in self.trainings]
        raise unknown("part of a report", part, get_args(Part))

    def _repr_html_(self) -> str:
        from deltalab.study.reports.notebook import to_html

        return to_html(self)


def report(store: Store, study_id: int, *, which: Stage = "confirm") -> Report:
    """A study's answer as `deltalab.study.answers.answer.answer` finds it, ready to be shown.

    Raises `InputError` where there is no such study.
    """
    return Report(**vars(answer(store, study_id, which=which)))


def caption(table: TaskTable) -> str:
    """What a table measures, in one line."""
    direction = "higher" if table.maximize else "lower"
    return (
        f"{table.task} (version {table.version}): {table.metric} on {table.split}, {direction} is better, "
        f"chance {table.chance:.3g}"
    )


def headers(table: TaskTable) -> list[str]:
    """The headers of `cells`."""
    costs = ["us/token", "flops/token", "state", "parameters"]
    return ["arm", "seeds", table.metric, "difference", "p", "verdict", *costs, "tuned"]


def cells(row: Row) -> list[str]:
    """A row as text, for a terminal as for a page: "" where a figure is not defined."""
    seeds = str(row.score.n)
    if row.score.missing:
        seeds = f"{row.score.n - row.score.missing} of {row.score.n}"
    if row.diverged:
        seeds += f", {row.diverged} runs diverged"
    return [
        row.arm,
        seeds,
        format_interval(row.score),
        format_interval(row.difference, "+") if row.difference else "",
        format_p(row.difference.p if row.difference else None),
        row.verdict,
        "" if row.microseconds_per_token is None else f"{row.microseconds_per_token:.3g}",
        "" if row.flops_per_token is None else f"{row.flops_per_token:,.0f}",
        "" if row.state_size is None else f"{row.state_size:,}",
        "" if row.parameters is None else f"{row.parameters:,}",
        format_values(row.tuned) + (f" ({row.chose} of {row.score.n} seeds)" if len(row.by_budget) > 1 else ""),
    ]


def training_cells(row: TrainingRow) -> list[str]:
    """A training as text under `TRAINING_HEADERS`: "" where a figure is not known."""
    losses = [f"{row.losses[split]:.4f}" if split in row.losses else "" for split in ("train", "validation")]
    return [
        row.name,
        row.arm or "",
        row.rule,
        "" if row.parameters is None else f"{row.parameters:,}",
        f"{row.steps:,}",
        f"{row.tokens:,}",
        *losses,
        "" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}",
        ", ".join(f"{name} {value:.4g}" for name, value in row.evaluations.items()),
    ]


def _training_grid(rows: Sequence[TrainingRow]) -> Table:
    """Trainings without their evaluations. Figures and the words of headings stay whole; names fold."""
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header in TRAINING_HEADERS[:-1]:
        if header in ("training", "arm", "rule"):
            grid.add_column(Text(header), overflow="fold", min_width=len(header))
        else:
            grid.add_column(Text(header.replace(" ", "\n")), no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, training_cells(row)[:-1]))
    return grid


def ladder_caption(ladder: Ladder) -> str:
    direction = "higher" if ladder.maximize else "lower"
    return f"Ladder of {ladder.task}: differences to the base in {ladder.metric}, {direction} is better"


def ladder_headers(ladder: Ladder) -> list[str]:
    """The headers of `ladder_cells`."""
    sizes = [size.label.removeprefix(f"{ladder.task}.") for size in ladder.sizes]
    return ["arm", *sizes, "slope", "p", "verdict"]


def ladder_cells(ladder: Ladder) -> list[list[str]]:
    """A row of text for each arm beside the base."""
    return [
        [
            row.arm,
            *(format_interval(difference, "+") for difference in row.differences),
            format_interval(row.slope, "+"),
            format_p(row.slope.p),
            row.verdict,
        ]
        for row in ladder.arms
        if row.slope is not None
    ]


def _ladder_lines(ladder: Ladder) -> Iterator[list[str]]:
    """The cells of `ladder_cells` in three columns: a line for each size and the slope, the verdict under the arm."""
    _, *sizes, _, _, _ = ladder_headers(ladder)
    for arm, *differences, slope, p, said in ladder_cells(ladder):
        names = [arm, said, *[""] * (len(sizes) - 1)]
        for name, size, difference in zip(names, [*sizes, f"slope, p {p}"], [*differences, slope], strict=True):
            yield [name, size, difference]


def ladder_notes(ladder: Ladder) -> list[str]:
    """What the fits say, and how to read the table."""
    computes = ", ".join(f"{size.compute:.2g}" for size in ladder.sizes)
    notes = [
        f"Operations of the base's training, by size: {computes}. The slope is per tenfold of them, tested over all "
        "arms by flips of whole seeds; intervals of differences hold jointly over sizes and arms.",
        *ladder.notes,
    ]
    for row in ladder.arms:
        if row.fit:
            a, b, c = (
                f"{value:.3g} [{low:.3g}, {high:.3g}]"
                for value, low, high in zip((row.fit.a, row.fit.b, row.fit.c), row.fit.low, row.fit.high, strict=True)
            )
            notes.append(f"{row.arm}: loss = a + b C^-c with a {a}, b {b}, c {c}; C 1 is the base's smallest size.")
        for found in row.predictions:
            notes.append(
                f"{row.arm} at {found.label}, which the fits left out: predicted difference in loss "
                f"{format_interval(found.predicted, '+')}, measured {format_interval(found.measured, '+')}: "
                + ("they agree." if found.agrees else "the prediction misses.")
            )
    return notes


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """A line for each trial that raised."""
    return [f"failed: {f.name} on {f.task}: {f.message}" for f in failures]


def _grid(table: TaskTable, columns: Sequence[int], width: int) -> Table:
    """A table's columns, with cells broken into as few lines as fit into the width.

    Where the narrowest form is too wide, names fold; figures fold only where that is not enough. Nothing is cut off.
    """
    shown = [headers(table), *map(cells, table.rows)]
    for form in range(4):
        broken = [[_broken(row[i], i, form) for i in columns] for row in shown]
        widths = [
            max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*broken, strict=True)
        ]
        gap = 2 if form < 2 else 1
        over = sum(widths) + gap * (len(columns) - 1) - width
        if over <= 0:
            break
    names = [at for at, i in enumerate(columns) if i in (ARM, TUNED) and widths[at] > SHORTEST_NAME]
    for _ in range(over):
        names = [at for at in names if widths[at] > SHORTEST_NAME]
        widths[max(names or range(len(columns)), key=widths.__getitem__)] -= 1
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0), caption_justify="left")
    for header, size in zip(broken[0], widths, strict=True):
        grid.add_column(Text(header), overflow="fold", min_width=size, max_width=size)
    for row, said in zip(table.rows, broken[1:], strict=True):
        grid.add_row(*map(Text, said), style=STYLE.get(row.verdict, ""))
    if any(SHORT_VERDICT in said for said in broken):
        grid.caption = Text(f"{SHORT_VERDICT}: {NO_DIFFERENCE}", style="")
    return grid


def _broken(cell: str, column: int, form: int) -> str:
    """A cell broken into lines: not at all in form 0; an interval into two in forms 1 and 2, into three in form 3.

    >>> _broken("0.928 [0.878, 0.977]", METRIC, 3).split("\\n")
    ['0.928', '[0.878,', '0.977]']
    """
    if form == 0 or column == ARM:
        return cell
    if column == VERDICT:
        return SHORT_VERDICT if cell == NO_DIFFERENCE else cell.replace(" ", "\n") if form == 3 else cell
    if column in (METRIC, DIFFERENCE):
        return cell.replace(" ", "\n") if form == 3 else cell.replace(" [", "\n[")
    cell = cell.replace(", ", ",\n")
    if column == TUNED:
        return cell.replace("=", "=\n") if form > 1 else cell
    return cell.replace("/", "/\n")


def _section_grid(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table about a search. A task's name stands below its metric; what is too wide all the same folds."""
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for header in headers:
        grid.add_column(Text(header.replace("@", "\n@")), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flat(table: TaskTable, row: Row) -> dict[str, Any]:
    score, difference = asdict(row.score), asdict(row.difference or UNKNOWN)
    own = asdict(row)
    del own["score"], own["difference"]
    return {
        "task": table.task,
        "metric": table.metric,
        "maximize": table.maximize,
        "split": table.split,
        **own,
        **{f"score_{key}": value for key, value in score.items()},
        **{f"difference_{key}": value for key, value in difference.items()},
    }


def _flat_ladder(ladder: Ladder) -> Iterator[dict[str, Any]]:
    """A line for each arm beside the base and each size. Slope and verdict, which are of all sizes, stand in each."""
    for row in ladder.arms:
        if row.slope is not None:
            for size, difference in zip(ladder.sizes, row.differences, strict=True):
                yield {
                    "ladder": ladder.task,
                    "metric": ladder.metric,
                    "maximize": ladder.maximize,
                    "arm": row.arm,
                    "size": size.label,
                    "compute": size.compute,
                    **{f"difference_{key}": value for key, value in asdict(difference).items()},
                    **{f"slope_{key}": value for key, value in asdict(row.slope).items()},
                    "verdict": row.verdict,
                }


def _flat_training(row: TrainingRow) -> dict[str, Any]:
    flat = {key: value for key, value in asdict(row).items() if key not in ("losses", "evaluations", "about")}
    return {
        **flat,
        "train_loss": row.losses.get("train"),
        "validation_loss": row.losses.get("validation"),
        "evaluations": row.evaluations,
    }


def _dtypes() -> dict[str, str]:
    """The type of each figure of `to_frame`, by its column."""
    prefixes = ((Row, ""), (TrainingRow, ""), (Interval, "score_"), (Difference, "difference_"), (Difference, "slope_"))
    found = {f"{prefix}{field.name}": DTYPES.get(field.type) for kind, prefix in prefixes for field in fields(kind)}
    found |= {"maximize": "bool", **dict.fromkeys(("compute", "train_loss", "validation_loss"), "float64")}
    return {column: dtype for column, dtype in found.items() if dtype}


def _field(value: Any) -> Any:
    """A value as a field of a CSV file: dicts and lists as JSON, a time in ISO 8601, None where it is not defined.

    >>> _field({"train.lr": 0.01}), _field([0.5, math.nan]), _field(math.inf)
    ('{"train.lr": 0.01}', '[0.5, null]', None)
    """
    value = _without_nan(value)
    if isinstance(value, dict | list):
        return json.dumps(value)
    return value.isoformat() if isinstance(value, datetime) else value


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
