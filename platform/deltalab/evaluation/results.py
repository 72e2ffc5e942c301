"""Holds results of evaluations, and keeps them in a file beside the weights."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deltalab.errors import InputError

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
    """

    step: int | None
    task: str
    metric: str
    value: float
    examples: int | None
    stderr: float | None = None


def write(results: Sequence[Result], directory: Path, about: Mapping[str, Any]) -> Path:
    """Adds results to the `evaluations.json` of a folder.

    A result replaces an earlier one with the same step, task and metric.

    Args:
        results: The results.
        directory: The folder.
        about: Further keys of each result in the file.

    Returns:
        The file.

    Raises:
        InputError: If the folder has an `evaluations.json` that is not a file of results.
    """
    file = directory / FILE
    earlier: list[dict[str, Any]] = []
    if file.is_file():
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))["evaluations"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{file}: is no file of evaluations; move it away") from None
    rows = {(row["step"], row["task"], row["metric"]): row for row in earlier}
    for result in results:
        value = result.value if math.isfinite(result.value) else None
        rows[result.step, result.task, result.metric] = {**asdict(result), "value": value, **about}
    partial = file.with_name(f".{FILE}.partial")
    partial.write_text(json.dumps({"evaluations": list(rows.values())}, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def fingerprint(folder: Path) -> str:
    """Returns the SHA-256 of the files of a folder's weights, by which an evaluation names the weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as opened_file:
            while block := opened_file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


OWN = ("loss", "needle", "needle_text", "proxy")
"""The names of our tasks. Any other name is that of a task of lm-evaluation-harness."""
