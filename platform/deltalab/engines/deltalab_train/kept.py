"""Finds the checkpoints of a run, and removes the oldest ones."""

import re
import shutil
from pathlib import Path


def named_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints named `step-N`, from the oldest to the newest."""
    checkpoints = [
        (int(match[1]), checkpoint)
        for checkpoint in folder.glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", checkpoint.name))
    ]
    return [checkpoint for _, checkpoint in sorted(checkpoints)]


def remove_oldest(folder: Path, keep: int) -> None:
    """Removes all checkpoints but the newest `keep`."""
    for old in named_checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
