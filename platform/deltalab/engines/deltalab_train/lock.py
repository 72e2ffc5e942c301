"""Keeps two trainings from writing to one run: every process of a training holds a shared lock on its folder."""

import fcntl
from pathlib import Path
from typing import IO

FILE = ".lock"


def share(run: Path) -> IO[str]:
    """Holds the lock until the file is closed or the process ends, by whatever signal."""
    file = (run / FILE).open("w")
    fcntl.flock(file, fcntl.LOCK_SH)
    return file
