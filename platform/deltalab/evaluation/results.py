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
    from deltalab.evaluation.items import Items

FILE = "evaluations.json"


@dataclass(frozen=True)
class Result:
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

    A result replaces an earlier one with the same step, task and metric. If the value is another one, comparisons of
    the earlier value are dropped. A comparison replaces an earlier one of the same result with the same model.

    Args:
        results: The results.
        directory: The folder.
        about: Further keys of each result in the file.
        comparisons: The comparisons, as `deltalab.evaluation.compare.Comparison` has them.

    Returns:
        The file.

    Raises:
        InputError: If the folder has an `evaluations.json` that is not a file of results.
    """
    file = directory / FILE
    earlier: list[dict[str, Any]] = []
    compared: list[Mapping[str, Any]] = []
    if file.is_file():
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            earlier, compared = content["evaluations"], content.get("comparisons", [])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{file}: is no file of evaluations; move it away") from None
    rows = {(row["step"], row["task"], row["metric"]): row for row in earlier}
    others = {(*_of(row), row["reference"], row["reference_step"]): row for row in compared}
    for result in results:
        row = {**result.row(), "value": result.value if math.isfinite(result.value) else None, **about}
        if rows.get(_of(row), row)["value"] != row["value"]:
            others = {key: other for key, other in others.items() if key[:3] != _of(row)}
        rows[_of(row)] = row
    others |= {(*_of(row), row["reference"], row["reference_step"]): row for row in comparisons}
    content = {"evaluations": list(rows.values()), **({"comparisons": list(others.values())} if others else {})}
    partial = file.with_name(f".{FILE}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def _of(row: Mapping[str, Any]) -> tuple[int | None, str, str]:
    """What tells a row of results from others."""
    return row["step"], row["task"], row["metric"]


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
