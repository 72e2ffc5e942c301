"""A study that was imported, as a study file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deltalab.errors import InputError

LINE = "# yaml-language-server: $schema=study.schema.json"
SEEDS = 6
TRIALS = 4
"""The most candidates of the learning rate; a choice of more is tuned over its range."""


@dataclass(frozen=True)
class Imported:
    """What a configuration of another tool says.

    Attributes:
        name: A name for the study.
        source: Where it comes from.
        tasks: The tasks by label.
        base: The base, as a study file has it.
        arms: The arms by name.
        rates: The learning rates that were swept.
        left_out: What has no counterpart, or another form.
    """

    name: str
    source: str
    tasks: Mapping[str, Mapping[str, Any]]
    base: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    rates: Sequence[float]
    left_out: Sequence[str]

    def to_yaml(self) -> str:
        """Writes the study file, with what was left out as comments at its head."""
        study: dict[str, Any] = {
            "name": "".join(letter if letter.isalnum() else "_" for letter in self.name).strip("_") or "imported",
            "description": f"Imported from {self.source}.",
            "task": dict(self.tasks),
            "base": dict(self.base),
        }
        if self.arms:
            study["arms"] = dict(self.arms)
        if len(self.rates) > 1:
            low, high = min(self.rates), max(self.rates)
            few = len(self.rates) <= TRIALS
            search = {"choice": list(self.rates)} if few else {"log_uniform": [low, high]}
            study["tune"] = {"train.lr": search, "trials": len(self.rates) if few else TRIALS}
        study["seeds"] = SEEDS
        notes = "".join(f"# - {' '.join(note.split())}\n" for note in self.left_out)
        head = f"{LINE}\n# Imported from {self.source}. What has no counterpart, or another form:\n{notes}"
        return head + yaml.safe_dump(_plain(study), sort_keys=False, width=110)


def write_study(imported: Imported, out: Path) -> None:
    """Writes a study file.

    Raises:
        InputError: The file exists, or cannot be written.
    """
    if out.exists():
        raise InputError(f"{out}: exists; give another name with --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = out.with_suffix(".partial")
        partial.write_text(imported.to_yaml(), encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror or error}") from None


def nearest_batch(size: object) -> int:
    """Returns the batch size of training, out of a number or a pair for training and test."""
    first = size[0] if isinstance(size, tuple | list) and size else size
    return first if isinstance(first, int) and not isinstance(first, bool) and first > 0 else 32


def _plain(value: Any) -> Any:
    """Returns a value in the types of YAML, without tuples and without two names for one list."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
