"""Appends values to `metrics.jsonl` of a run, one line for each value: {step, split, name, value}."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path


def append(step: int, values: Iterable[tuple[str, str, float]]) -> None:
    """Appends the values of a step.

    Args:
        step: The step.
        values: Tuples (split, name, value). A value that is not finite is written as null.
    """
    file = Path(os.environ["DELTALAB_RUN"]) / "metrics.jsonl"
    text = "".join(
        json.dumps({"step": step, "split": split, "name": name, "value": value if math.isfinite(value) else None})
        + "\n"
        for split, name, value in values
    )
    with file.open("a", encoding="utf-8") as stream:
        stream.write(text)
