"""Writes a report for files and programs: Markdown, CSV, JSON and DataFrames."""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, is_dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from deltalab.errors import unknown
from deltalab.statistics.intervals import Interval
from deltalab.statistics.joint_test import UNKNOWN, Difference
from deltalab.store.trainings import ComparisonRow, TrainingRow
from deltalab.study.answers.answer import Answer
from deltalab.study.answers.ladder_trends import TaskLadder
from deltalab.study.answers.rows import Row, SeedScore, TaskTable
from deltalab.study.reports import columns
from deltalab.study.reports.columns import cells, figures, headers
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

if TYPE_CHECKING:
    import pandas as pd


Part = Literal["arms", "seeds", "metrics", "ladders", "trainings", "comparisons"]
"""A table of a report. "arms" has a line per task and arm; "seeds" has a line per task, arm and seed; "metrics" has a
line per task, arm and further metric; "ladders" has a line per ladder, arm and size; "trainings" has a line per
training; "comparisons" has a line per training, evaluation and model that it is compared with."""
IN_CSV: tuple[Part, ...] = ("arms", "ladders", "trainings", "comparisons")
"""The tables of a CSV file. Its arms have "seeds" and "metrics" as JSON, so that most reports are a single table."""

DTYPES: dict[Any, str] = {
    int: "Int64",
    int | None: "Int64",
    float: "float64",
    float | None: "float64",
    bool: "bool",
}
"""The pandas type of a figure, by the Python type that its column or field declares."""
NOT_KNOWN: dict[Any, Interval | Difference] = {Interval: Interval(math.nan, math.nan, math.nan, 0), Difference: UNKNOWN}
"""What stands for a figure that is not known, by its type."""


def markdown(answer: Answer) -> str:
    """Returns a report as Markdown."""
    lines = [f"## {title(answer)}", "", sentence(answer), "", *_list([f"**{warning}**" for warning in answer.warnings])]
    for table in shown_tables(answer):
        lines += [f"### {caption(table)}", "", *_list([f"**{warning}**" for warning in table.warnings])]
        lines += [
            *_table(headers(table), [cells(row, columns.columns(table)) for row in table.rows]),
            "",
            *_list(table.notes),
        ]
        if table.metrics:
            lines += [f"#### {metrics_caption(table)}", "", *_table(metrics_headers(table), metrics_cells(table)), ""]
    for ladder in answer.ladders:
        lines += [f"### {ladder_caption(ladder)}", "", *_table(ladder_headers(ladder), ladder_cells(ladder))]
        lines += ["", *_list(ladder_notes(ladder))]
    for section in search_lines(answer):
        lines += [f"### {section.title}", ""]
        if section.rows:
            lines += [*_table(section.headers, section.rows), ""]
        lines += _list(section.notes) or [""]
    lines += [f"- {line}" for line in (*failure_lines(answer.failures), *answer.notes)]
    if answer.trainings:
        lines += ["", f"### {TRAININGS}", "", *_table(TRAINING_HEADERS, map(training_cells, answer.trainings))]
    if compared := comparison_cells(answer.trainings):
        lines += ["", f"### {COMPARISONS}", "", *_table(COMPARISON_HEADERS, compared), "", f"- {COMPARISON_NOTE}"]
    return "\n".join(lines) + "\n"


def _list(lines: Sequence[str]) -> list[str]:
    """The lines as a Markdown list and an empty line; [] without lines."""
    return [*(f"- {line}" for line in lines), ""] if lines else []


def _table(headings: Sequence[str], rows: "Iterator[list[str]] | Sequence[Sequence[str]]") -> list[str]:
    return [_row(headings), _row(["---"] * len(headings)), *map(_row, rows)]


def _row(texts: Sequence[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def as_json(answer: Answer) -> str:
    """Returns every figure of a report as JSON; null for a figure that is not known."""
    parts = {"sentence": sentence(answer), **asdict(answer)}
    for part, table in zip(filter(None, [parts["headline"], *parts["tables"]]), answer.all_tables, strict=True):
        part["rows"] = [{key: _plain(value) for key, value in figures(row).items()} for row in table.rows]
    return json.dumps(_without_nan(parts), indent=2, allow_nan=False, default=datetime.isoformat)


def _plain(value: Any) -> Any:
    """The value for JSON: a dataclass becomes a dict."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def as_csv(answer: Answer) -> str:
    """Returns the parts of a report as CSV tables, with an empty line between tables."""
    parts = []
    for rows in filter(None, (records(answer, part) for part in IN_CSV)):
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _field(value) for key, value in row.items()} for row in rows)
        parts.append(out.getvalue())
    return "\n".join(parts)


def as_frame(answer: Answer, part: Part) -> "pd.DataFrame":
    """Returns a part of a report as a DataFrame.

    Raises:
        InputError: There is no such part.
    """
    import pandas as pd  # It takes half a second to load.

    rows = records(answer, part)
    return pd.DataFrame(rows).astype({key: dtype for key, dtype in _dtypes().items() if rows and key in rows[0]})


def records(answer: Answer, part: str) -> list[dict[str, Any]]:
    """Returns a part of a report as flat records, in which an interval takes several keys.

    Raises:
        InputError: There is no such part.
    """
    if part == "arms":
        return [_arm_record(table, row) for table in answer.all_tables for row in table.rows]
    if part == "seeds":
        return [record for table in answer.tables for row in table.rows for record in _seed_records(table, row)]
    if part == "metrics":
        return [record for table in answer.tables for row in table.rows for record in _metric_records(table, row)]
    if part == "ladders":
        return [record for ladder in answer.ladders for record in _ladder_records(ladder)]
    if part == "trainings":
        return [_training_record(row) for row in answer.trainings]
    if part == "comparisons":
        return [{"training": row.name, **asdict(one)} for row in answer.trainings for one in row.comparisons]
    raise unknown("part of a report", part, get_args(Part))


def _arm_record(table: TaskTable, row: Row) -> dict[str, Any]:
    record = {"task": table.task, "metric": table.metric, "maximize": table.maximize, "split": table.split}
    for column in columns.COLUMNS:
        value = column.value(row)
        if column.type in (Interval, Difference):
            record |= {f"{column.key}_{name}": part for name, part in asdict(value or NOT_KNOWN[column.type]).items()}
        elif column.key:
            record[column.key] = _plain(value)
    return record


def _seed_records(table: TaskTable, row: Row) -> Iterator[dict[str, Any]]:
    for seed, scored in row.scores.items():
        about = {"task": table.task, "metric": table.metric, "maximize": table.maximize, "split": table.split}
        yield {**about, "arm": row.arm, "seed": seed, **asdict(scored)}


def _metric_records(table: TaskTable, row: Row) -> Iterator[dict[str, Any]]:
    for name, interval in row.metrics.items():
        figures_of_it = {key: value for key, value in asdict(interval).items() if key != "missing"}
        yield {"task": table.task, "split": table.split, "arm": row.arm, "metric": name, **figures_of_it}


def _ladder_records(ladder: TaskLadder) -> Iterator[dict[str, Any]]:
    """Yields a record for each arm but the reference at each size. Every record repeats the arm's slope and verdict."""
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


def _training_record(row: TrainingRow) -> dict[str, Any]:
    record = {
        key: value
        for key, value in asdict(row).items()
        if key not in ("losses", "evaluations", "stderrs", "comparisons", "about")
    }
    return {
        **record,
        "train_loss": row.losses.get("train"),
        "validation_loss": row.losses.get("validation"),
        "evaluations": row.evaluations,
        "stderrs": row.stderrs,
    }


def _dtypes() -> dict[str, str]:
    """The pandas type of each figure of `records`, by the figure's key."""
    types: dict[str, Any] = {column.key: column.type for column in columns.COLUMNS}
    intervals = {f"{column.key}_": column.type for column in columns.COLUMNS if column.type in NOT_KNOWN}
    kinds = [
        *intervals.items(),
        ("slope_", Difference),
        ("", Interval),
        ("", SeedScore),
        ("", TrainingRow),
        ("", ComparisonRow),
    ]
    for prefix, kind in kinds:
        types |= {f"{prefix}{field.name}": field.type for field in fields(kind)}
    types |= {"maximize": bool, "seed": int, **dict.fromkeys(("compute", "train_loss", "validation_loss"), float)}
    return {key: DTYPES[kind] for key, kind in types.items() if kind in DTYPES}


def _field(value: Any) -> Any:
    """A value as a field of a CSV file: a dict or list as JSON, a time in ISO 8601, NaN or infinity as None.

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
