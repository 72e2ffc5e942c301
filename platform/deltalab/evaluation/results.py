"""Holds results of evaluations, and keeps them in a file beside the weights."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError

if TYPE_CHECKING:
    from deltalab.data.token_shards import Packed
    from deltalab.evaluation.items import Items

FILE = "evaluations.json"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a task was asked, where values of one metric differ by it. None is what the task or the model has by itself.

    Attributes:
        split: The split of the packed data that was read; None if none was.
        limit: The examples that the user limited the task to.
        few_shot: The solved examples that the user put before each question.
        max_length: The most tokens of a question that the user asked for.
        other_data: The packed data, as `named_data` says it, if they are not those of the model's training.
    """

    split: str | None = None
    limit: int | None = None
    few_shot: int | None = None
    max_length: int | None = None
    other_data: str | None = None


@dataclass(frozen=True)
class Result(Setting):
    """A measured value.

    Attributes:
        step: The step of the checkpoint; None if it is not known.
        task: The name of the task.
        metric: The name of the metric.
        value: The value.
        examples: How many examples the value is the mean of; None if the number is not known.
        stderr: The standard error of the value; None if it is not known.
        items: The scores of the single items; None if the metric is no mean of them.
    """

    step: int | None
    task: str
    metric: str
    value: float
    examples: int | None
    stderr: float | None = None
    items: "Items | None" = field(default=None, compare=False, repr=False)

    def row(self) -> dict[str, Any]:
        """Returns all but the items, by name."""
        return {part.name: getattr(self, part.name) for part in fields(self) if part.name != "items"}


def write(
    results: Sequence[Result],
    directory: Path,
    about: Mapping[str, Any],
    comparisons: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Adds results to the `evaluations.json` of a folder, and comparisons of the folder's model with others.

    A result replaces an earlier one with the same step, task, metric and setting. If the value is another one, all
    comparisons of the earlier value are dropped: those of this file, and those with this model in other files. A
    comparison replaces an earlier one of the same result with the same model.

    Args:
        results: The results.
        directory: The folder.
        about: Further keys of each result in the file.
        comparisons: The comparisons, as `deltalab.evaluation.compare.Comparison` has them, each with the step of the
            model that the folder's model is compared with, and a `reference_file`, the `evaluations.json` of that one.

    Returns:
        The file.

    Raises:
        InputError: If the folder has an `evaluations.json` that is not a file of results.
    """
    file = directory / FILE
    content = _read(file)
    rows = {_of(row): row for row in content["evaluations"]}
    others = {_pair(row): row for row in content["comparisons"]}
    changed = set[tuple[Any, ...]]()
    for result in results:
        row = {**result.row(), "value": result.value if math.isfinite(result.value) else None, **about}
        if rows.get(_of(row), row)["value"] != row["value"]:
            changed.add(_of(row))
        rows[_of(row)] = row
    others = {key: row for key, row in others.items() if _of(row) not in changed}
    others |= {_pair(row): row for row in comparisons}
    _write(file, {**content, "evaluations": [*rows.values()], "comparisons": [*others.values()]})
    here = str(file.resolve())
    if changed:
        for other in map(Path, content["compared_in"]):
            if other.is_file():
                theirs = _read(other)
                left = [
                    row
                    for row in theirs["comparisons"]
                    if row.get("reference_file") != here or _of_reference(row) not in changed
                ]
                _write(other, {**theirs, "comparisons": left})
    for reference in dict.fromkeys(str(row["reference_file"]) for row in comparisons):
        of_reference = _read(Path(reference))
        known = of_reference["compared_in"]
        _write(Path(reference), {**of_reference, "compared_in": [*dict.fromkeys([*known, here])]})
    return file


def earlier_rows(results: Sequence[Result], directory: Path) -> list[dict[str, Any]]:
    """Reads the results of steps before that of `results`, for the same tasks, metrics and settings.

    Args:
        results: The results of one step.
        directory: The folder of the `evaluations.json`.
    """
    asked = {_of({**result.row(), "step": None}): result.step for result in results}
    return [
        row
        for row in _read(directory / FILE)["evaluations"]
        if (step := asked.get(_of({**row, "step": None}))) is not None and row["step"] < step
    ]


def require_readable(directory: Path) -> None:
    """Raises `InputError` if a folder has an `evaluations.json` that is not a file of results; it may have none."""
    _read(directory / FILE)


def _read(file: Path) -> dict[str, Any]:
    """The content of an `evaluations.json`, with empty lists for what it lacks."""
    content: dict[str, Any] = {"evaluations": [], "comparisons": [], "compared_in": []}
    if file.is_file():
        try:
            content |= json.loads(file.read_text(encoding="utf-8"))
            for row in (*content["evaluations"], *content["comparisons"]):
                _of(row)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{file}: is no file of evaluations; move it away") from None
    return content


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """Writes an `evaluations.json` whole or not at all, without the lists that are empty."""
    kept = {key: value for key, value in content.items() if value or key == "evaluations"}
    partial = file.with_name(f".{FILE}.partial")
    partial.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def _of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a row of results from others. What a row of an older file does not name is the default."""
    setting = {part.name: row.get(part.name) for part in fields(Setting)}
    setting["split"] = setting["split"] or "validation"
    return row["step"], row["task"], row["metric"], *setting.values()


def _of_reference(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the value of the model that a row compares with: the data may be other ones than its training's."""
    return _of({**row, "step": row["reference_step"], "other_data": row.get("reference_other_data")})


def _pair(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells a comparison from others."""
    return (*_of(row), row["reference"], row["reference_step"])


def named_data(data: "Packed") -> str:
    """Returns the name of packed data in settings: that of their folder, and the start of their hash."""
    return f"{data.folder.resolve().name}-{data.meta['sha256'][:8]}"


def fingerprint(files: Iterable[Path]) -> str:
    """Returns the SHA-256 of the contents of files, by which an evaluation names them."""
    digest = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as opened_file:
            while block := opened_file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


OWN = ("loss", "needle", "needle_multikey", "needle_multivalue", "needle_multiquery", "needle_text", "proxy")
"""The names of our tasks. Any other name is that of a task of lm-evaluation-harness."""

VERSIONS = {"needle": 2, "needle_text": 2}
"""The versions of our tasks that changed what a metric means. Version 1 of needles was not generated."""


def titled(task: str) -> str:
    """Returns the name of one of our tasks in results. A later version is part of it.

    Examples:
        >>> titled("loss"), titled("needle")
        ('loss', 'needle v2')
    """
    return f"{task} v{VERSIONS[task]}" if task in VERSIONS else task
