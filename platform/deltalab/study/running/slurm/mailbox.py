"""The files in a shared folder by which a driver and the places of its jobs of Slurm talk.

A file has one writer, who replaces it as a whole, and a reader looks again until it reads what it waits for. So the
folder needs no locks, which network file systems may lack.
"""

import json
import os
import threading
from pathlib import Path
from typing import Any

PULSE = 2.0
"""Seconds between two signs of life of a driver or a place."""

OWNER = "driver.json"
"""The name of the file by which the driver shows that it lives, and says which process it is."""


def write(file: Path, content: dict[str, Any]) -> None:
    """Replaces a file by one with other content. Threads of a process may write at a time."""
    partial = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_ident()}.partial")
    partial.write_text(json.dumps(content))
    partial.replace(file)


def read(file: Path) -> dict[str, Any] | None:
    """Reads a file; None if the file is not there, or a server of files lost it while it was replaced."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return content


class Mailbox:
    """The files of one place.

    Attributes:
        name: The name of the place: the number of the job, and that of the place in it.
        order: The file with the stack that the place is to execute, which the driver writes.
        state: The file with what the place does, which the place writes.
    """

    def __init__(self, folder: Path, job: str, rank: int) -> None:
        """Names the files. They need not be there.

        Args:
            folder: The folder of the driver.
            job: The number of the job.
            rank: The number of the place in its job.
        """
        self.name = f"{job}-{rank}"
        self.order, self.state = folder / f"{self.name}.order.json", folder / f"{self.name}.state.json"
        self._folder = folder

    def result(self, number: int) -> Path:
        """The file with what came of the order of a number, which the place writes."""
        return self._folder / f"{self.name}.{number}.result.json"
