"""Finds the checkpoints of a run, and removes the oldest ones."""

import re
import shutil
from pathlib import Path

from .milestones import is_milestone, step_of


def named_checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints named `step-N`, from the oldest to the newest."""
    checkpoints = [
        (int(match[1]), checkpoint)
        for checkpoint in folder.glob("step-*")
        if (match := re.fullmatch(r"step-(\d+)", checkpoint.name))
    ]
    return [checkpoint for _, checkpoint in sorted(checkpoints)]


def remove_oldest(folder: Path, keep: int, milestones: int | None) -> None:
    """Removes all checkpoints but the newest `keep` and the milestones."""
    for old in named_checkpoints(folder)[:-keep]:
        if not is_milestone(step_of(old), milestones):
            shutil.rmtree(old)
