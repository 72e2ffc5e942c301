"""Shows a study's answer: as tables on a terminal, as Markdown, CSV or JSON."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalab.store import Store
from deltalab.store.models import Stage
from deltalab.study.answer import NO_DIFFERENCE, Answer, Failure, Row, TaskTable, answer, format_interval, format_p
from deltalab.study.stats import paired

# Columns of a row's cells. On a terminal the costs stand apart, or the answer would not fit in 80 columns.
ANSWER, INTERVALS, COSTS = (0, 1, 2, 3, 4, 5), (2, 3), (0, 6, 7, 8, 9, 10)
STYLE = {"better": "green", "worse": "red", "failed": "red", "diverged": "red"}


class Report(Answer):
    """An answer that can be shown."""

    @property
    def title(self) -> str:
        profile = f", profile {self.profile}" if self.profile else ""
        return f"{self.study}{profile} ({self.state})"

    def to_rich(self) -> Group:
        """For a terminal."""
        parts: list[Table | Text] = [Text(self.title, style="bold")]
        for table in self.tables:
            parts += [Text(f"\n{caption(table)}"), _grid(table, ANSWER), Text(""), _grid(table, COSTS)]
            parts += [Text(f"- {note}") for note in table.notes]
        parts += [Text(f"- {line}") for line in (*failure_lines(self.failures), *self.notes)]
        return Group(*parts)

    def to_markdown(self) -> str:
        lines = [f"## {self.title}", ""]
        for table in self.tables:
            names = headers(table)
            lines += [f"### {caption(table)}", "", _markdown(names), _markdown(["---"] * len(names))]
            lines += [_markdown(cells(row)) for row in table.rows]
            lines += ["", *(f"- {note}" for note in table.notes), *([""] if table.notes else [])]
        lines += [f"- {line}" for line in (*failure_lines(self.failures), *self.notes)]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Every figure; what is not defined is null."""
        return json.dumps(_without_nan(asdict(self)), indent=2, allow_nan=False)

    def to_csv(self) -> str:
        """A line per task and arm; what is not defined is empty."""
        out = io.StringIO()
        lines = [_flat(table, row) for table in self.tables for row in table.rows]
        if lines:
            writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(_without_nan(lines))
        return out.getvalue()


def report(store: Store, study_id: int, *, which: Stage = "confirm") -> Report:
    """The answer of a study, as `answer` finds it, to be shown. Raises InputError: no such study."""
    return Report(**vars(answer(store, study_id, which=which)))


def caption(table: TaskTable) -> str:
    """What a table measures, in one line."""
    direction = "higher" if table.maximize else "lower"
    return (
        f"{table.task} (version {table.version}): {table.metric} on {table.split}, {direction} is better, "
        f"chance {table.chance:.3g}"
    )


def _grid(table: TaskTable, columns: Sequence[int]) -> Table:
    grid = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i in columns:
        grid.add_column(Text(headers(table)[i]), overflow="fold", no_wrap=i != COSTS[-1])
    for row in table.rows:
        said = [cell.replace(" [", "\n[") if i in INTERVALS else cell for i, cell in enumerate(cells(row))]
        # A terminal may be 80 columns wide; everywhere else the verdict is whole.
        said = ["no diff." if cell == NO_DIFFERENCE else cell for cell in said]
        grid.add_row(*(Text(said[i]) for i in columns), style=STYLE.get(row.verdict, ""))
    return grid


def headers(table: TaskTable) -> list[str]:
    """What stands above `cells`."""
    costs = ["us/token", "flops/token", "state", "parameters"]
    return ["arm", "seeds", table.metric, "difference", "p", "verdict", *costs, "tuned"]


def cells(row: Row) -> list[str]:
    """A row as it is read, on a terminal as on a page: "" for what is not defined."""
    seeds = str(row.score.n)
    if row.score.missing:
        seeds += f" of {row.score.n + row.score.missing}"
    if row.diverged:
        seeds += f", {row.diverged} diverged"
    return [
        row.arm,
        seeds,
        format_interval(row.score),
        format_interval(row.difference, "+") if row.difference else "",
        format_p(row.p_holm),
        row.verdict,
        "" if row.microseconds_per_token is None else f"{row.microseconds_per_token:.3g}",
        "" if row.flops_per_token is None else f"{row.flops_per_token:,.0f}",
        "" if row.state_size is None else f"{row.state_size:,}",
        "" if row.parameters is None else f"{row.parameters:,}",
        ", ".join(f"{key}={_value(value)}" for key, value in row.tuned.items()),
    ]


def _value(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def failure_lines(failures: Sequence[Failure]) -> list[str]:
    """A line for each trial that raised."""
    return [f"failed: {f.arm}, {f.stage} {f.number} on {f.task}: {f.message}" for f in failures]


def _markdown(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _flat(table: TaskTable, row: Row) -> dict[str, Any]:
    score, difference = asdict(row.score), asdict(row.difference or paired([], []))
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
        "tuned": json.dumps(row.tuned),
    }


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
