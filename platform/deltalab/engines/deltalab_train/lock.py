"""Keeps two trainings from writing to one run: every process of a training holds a shared lock on the run's folder."""

import fcntl
from pathlib import Path
from typing import IO

FILE = ".lock"


def share(run: Path) -> IO[str]:
    """Takes a shared lock on a run, which lasts until the returned file is closed or the process ends."""
    file = (run / FILE).open("w")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file
