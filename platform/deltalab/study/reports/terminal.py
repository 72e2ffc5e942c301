"""Draws a report on a terminal, fitted to its width. Nothing is cut off."""

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from deltalab.store.trainings import TrainingRow
from deltalab.study.answers.answer import Answer
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.answers.rows import TaskTable
from deltalab.study.reports.columns import Column, cells, columns, headers
from deltalab.study.reports.lines import (
    COMPARISON_HEADERS,
    COMPARISON_NOTE,
    COMPARISONS,
    TRAINING_HEADERS,
    TRAININGS,
    caption,
    comparison_cells,
    failure_lines,
    ladder_caption,
    ladder_cells,
    ladder_headers,
    ladder_notes,
    metrics_caption,
    metrics_cells,
    metrics_headers,
    search_lines,
    shown_tables,
    title,
    training_cells,
)
from deltalab.study.reports.sentence import sentence

STYLE = {"better": "green", "worse": "red", "equal": "cyan", "failed": "red", "diverged": "red"}
SHORT = 8
"""The most rows of a search's table on a terminal."""
ONE_TABLE = 120
"""The least width at which a terminal shows the answer and its costs in one table; a narrower one shows two tables."""
SHORTEST_NAME = 8
"""The least width, in characters, to which a name or a word among the tuned values is folded."""


def drawn(answer: Answer, width: int) -> Iterator[RenderableType]:
    """Yields the parts of an answer, from top to bottom.

    Args:
        answer: The answer.
        width: Characters in a line.
    """
    yield Text(title(answer), style="bold")
    yield Text(sentence(answer), style="bold")
    yield from _warnings(answer.warnings)
    for table in shown_tables(answer):
        yield Text(f"\n{caption(table)}")
        yield from _warnings(table.warnings)
        yield from _task_grids(table, width)
        yield from _notes(table.notes)
        if table.metrics:
            yield Text(f"\n{metrics_caption(table)}")
            yield from _metric_grids(table, width)
    for ladder in answer.ladders:
        yield Text(f"\n{ladder_caption(ladder)}")
        yield _ladder_grid(ladder, width >= ONE_TABLE)
        yield from _notes(ladder_notes(ladder))
    for section in search_lines(answer, SHORT):
        yield Text(f"\n{section.title}")
        if section.rows:
            yield _section_grid(section.headers, section.rows)
        yield from _notes(section.notes)
    if answer.search:
        yield Text("")
    yield from _notes([*failure_lines(answer.failures), *answer.notes])
    if answer.trainings:
        yield Text(f"\n{TRAININGS}")
        yield _training_grid(answer.trainings)
        yield from _notes([f"{row.name}: {training_cells(row)[-1]}" for row in answer.trainings if row.evaluations])
    if compared := comparison_cells(answer.trainings):
        yield Text(f"\n{COMPARISONS}")
        yield _section_grid(COMPARISON_HEADERS, compared)
        yield from _notes([COMPARISON_NOTE])


def _warnings(lines: Sequence[str]) -> Iterator[Text]:
    yield from (Text(f"! {line}", style="yellow") for line in lines)


def _notes(lines: Sequence[str]) -> Iterator[Text]:
    yield from (Text(f"- {line}") for line in lines)


def _task_grids(table: TaskTable, width: int) -> Iterator[RenderableType]:
    """Yields one table, or, on a narrow terminal, a table of the answer and below it a table of the costs."""
    if width >= ONE_TABLE:
        yield _task_grid(table, columns(table), width)
        return
    yield _task_grid(table, columns(table, "name", "answer"), width)
    if not table.over:
        yield Text("")
        yield _task_grid(table, columns(table, "name", "cost", "tuned"), width)


def _task_grid(table: TaskTable, chosen: Sequence[Column], width: int) -> Table:
    """The chosen columns of a table, with each cell broken into as few lines as the width allows.

    Names fold if the narrowest form is too wide; figures fold only if that is not enough.
    """
    texts = [headers(table, chosen), *(cells(row, chosen) for row in table.rows)]
    for form in range(4):
        broken = [[_broken(text, column, form) for text, column in zip(line, chosen, strict=True)] for line in texts]
        widths = [
            max(len(line) for cell in column for line in cell.split("\n")) for column in zip(*broken, strict=True)
        ]
        gap = 2 if form < 2 else 1
        over = sum(widths) + gap * (len(chosen) - 1) - width
        if over <= 0:
            break
    names = [at for at, column in enumerate(chosen) if column.group in ("name", "tuned")]
    for _ in range(over):
        names = [at for at in names if widths[at] > SHORTEST_NAME]
        widths[max(names or range(len(chosen)), key=widths.__getitem__)] -= 1
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    for header, size in zip(broken[0], widths, strict=True):
        grid.add_column(Text(header), overflow="fold", min_width=size, max_width=size)
    for row, line in zip(table.rows, broken[1:], strict=True):
        grid.add_row(*map(Text, line), style=STYLE.get(row.verdict, ""))
    return grid


def _broken(cell: str, column: Column, form: int) -> str:
    r"""A cell broken into lines: not at all in form 0; an interval into two in forms 1 and 2, into three in form 3.

    >>> from deltalab.study.reports.columns import COLUMNS
    >>> [score] = [column for column in COLUMNS if column.key == "score"]
    >>> _broken("0.928 [0.878, 0.977]", score, 3).split("\n")
    ['0.928', '[0.878,', '0.977]']
    """
    if form == 0 or column.group == "name":
        return cell
    if column.key == "verdict":
        return cell.replace(" ", "\n") if form == 3 else cell
    if column.bounds_head:
        return cell.replace(" ", "\n") if form == 3 else cell.replace(" [", "\n[")
    cell = cell.replace(", ", ",\n")
    if column.group == "tuned":
        return cell.replace("=", "=\n") if form > 1 else cell
    return cell.replace("/", "/\n")


def _metric_grids(table: TaskTable, width: int) -> Iterator[RenderableType]:
    """Yields the further metrics of a table, below one another in as few tables as the width allows. Names fold."""
    (_, *names), lines = metrics_headers(table), metrics_cells(table)
    longest = max(len(arm) for arm, *_ in lines)
    most = width - SHORTEST_NAME - 2
    widths = [min(most, max(len(name), *(len(line[at]) for line in lines))) for at, name in enumerate(names, 1)]
    start = 0
    while start < len(names):
        end = start + 1
        while end < len(names) and longest + sum(2 + size for size in widths[start : end + 1]) <= width:
            end += 1
        if start:
            yield Text("")
        grid = _grid()
        arm_width = min(longest, width - sum(2 + size for size in widths[start:end]))
        for name, size in zip(("arm", *names[start:end]), (arm_width, *widths[start:end]), strict=True):
            grid.add_column(Text(name), overflow="fold", min_width=size, max_width=size)
        for arm, *texts in lines:
            grid.add_row(*map(Text, (arm, *texts[start:end])))
        yield grid
        start = end


def _grid() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _ladder_grid(ladder: TaskLadder, is_wide: bool) -> Table:
    """The table of a ladder: a row per arm with the sizes side by side or, on a narrow terminal, below one another."""
    grid = _grid()
    for header in ladder_headers(ladder) if is_wide else ("arm", "size", "difference"):
        grid.add_column(Text(header), overflow="fold")
    for line in ladder_cells(ladder) if is_wide else _ladder_lines(ladder):
        grid.add_row(*(Text(cell.replace(" [", "\n[") if is_wide else cell) for cell in line))
    return grid


def _ladder_lines(ladder: TaskLadder) -> Iterator[list[str]]:
    """Yields `ladder_cells` in three columns: a line per size and one for the slope, the verdict under the arm."""
    _, *sizes, _, _, _ = ladder_headers(ladder)
    for arm, *differences, slope, p, verdict in ladder_cells(ladder):
        names = [arm, verdict, *[""] * (len(sizes) - 1)]
        for name, size, difference in zip(names, [*sizes, f"slope, p {p}"], [*differences, slope], strict=True):
            yield [name, size, difference]


def _section_grid(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table about a search. A task's name stands below its metric. A cell that is still too wide folds."""
    grid = _grid()
    for heading in headings:
        grid.add_column(Text(heading.replace("@", "\n@")), overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    return grid


def _training_grid(rows: Sequence[TrainingRow]) -> Table:
    """A table of trainings without their evaluations. Figures and the words of headings stay whole; names fold."""
    grid = _grid()
    for header in TRAINING_HEADERS[:-1]:
        if header in ("training", "arm", "rule"):
            grid.add_column(Text(header), overflow="fold", min_width=len(header))
        else:
            grid.add_column(Text(header.replace(" ", "\n")), no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, training_cells(row)[:-1]))
    return grid
