"""Reads the JSON files of benchmarks/, and writes tables and their cells in Markdown."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]


def load(name: str) -> dict[str, Any]:
    """Reads a JSON file of benchmarks/."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def ms(value: float) -> str:
    """Returns milliseconds as text."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def judged(ratio: float, goal: float, *, least: bool, digits: int = 2) -> str:
    """Returns a ratio with its goal, with three digits if two would not show on which side of the goal the ratio is."""
    is_met = ratio >= goal if least else ratio <= goal
    digits = digits if abs(ratio - goal) >= 0.005 else 3
    return f"{ratio:.{digits}f} (goal {goal:.{digits}f}{'' if is_met else ', missed'})"
