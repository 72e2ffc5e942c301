"""What an evaluation found, and the file beside the weights that keeps it."""

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
    """A measured value. step: of the checkpoint, None where it is not known. examples: how many it is the mean of."""

    step: int | None
    task: str
    metric: str
    value: float
    examples: int | None
    stderr: float | None = None


def write(results: Sequence[Result], directory: Path, about: Mapping[str, Any]) -> Path:
    """Adds the results to `evaluations.json` of a folder, where each replaces an earlier one of its step and name."""
    file = directory / FILE
    found: list[dict[str, Any]] = []
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))["evaluations"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"{file}: is no file of evaluations; move it away") from None
    rows = {(row["step"], row["task"], row["metric"]): row for row in found}
    for result in results:
        value = result.value if math.isfinite(result.value) else None
        rows[result.step, result.task, result.metric] = {**asdict(result), "value": value, **about}
    partial = file.with_name(f".{FILE}.partial")
    partial.write_text(json.dumps({"evaluations": list(rows.values())}, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)
    return file


def fingerprint(folder: Path) -> str:
    """SHA-256 of the weights' files, by which an evaluation names what it measured."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as opened_file:
            while block := opened_file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


OWN = ("loss", "needle", "needle_text", "proxy")
"""Our tasks; any other name is one of lm-evaluation-harness."""
