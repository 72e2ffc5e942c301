"""Tells how an engine has ended, and what ends it for now."""

import shutil
from pathlib import Path

from deltalab.engines import checkpoints
from deltalab.errors import InputError

FULL = ("No space left on device", "Errno 28", "Disk quota exceeded")
"""Texts in an engine's log that mean a full disk."""
KILLED = ("(SIGKILL)", "(SIGTERM)", "(SIGHUP)", "SignalException")
"""Texts in an engine's log that mean that a signal ended one of its processes."""


class Transient(InputError):
    """A training cannot go on now, and can later with the same settings: a disk is full, or another process trains."""

    kind = "transient"


def raise_from_log(run: Path, parameters: int) -> None:
    """Reports the failure of an engine whose disk was full.

    Args:
        run: The folder of the run.
        parameters: The number of the model's parameters.

    Raises:
        Transient: If the disk is full.
    """
    log = tail(run / "log.txt")
    free = shutil.disk_usage(run).free
    if any(text in log for text in FULL) or free < checkpoints.BYTES_A_PARAMETER * parameters // 2:
        complete = checkpoints.complete_checkpoints(run)
        newest = f"{complete[-1]} is whole, and the same command goes on from it" if complete else None
        what_is_left = newest or "there is no checkpoint yet"
        raise Transient(f"{run}: the disk is full, {amount(free)} are free; {what_is_left}")


def was_killed(run: Path, status: int) -> bool:
    """Returns whether something from outside ended an engine or one of its processes, as its status or log tells."""
    return status < 0 or any(text in tail(run / "log.txt") for text in KILLED)


def last_error(run: Path) -> str:
    """Returns the last line of the engine's log that names an error, or the last line if none does."""
    lines = [line.strip() for line in tail(run / "log.txt").splitlines()]
    errors = [line for line in lines if "Error" in line.split(":")[0] or "Error:" in line]
    causes = [line for line in errors if "ChildFailedError" not in line and "Signal" not in line]
    return (causes or errors or lines or ["no output"])[-1]


def tail(file: Path, size: int = 2**16) -> str:
    """Returns the last `size` bytes of a file as text."""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - size))
        return stream.read().decode("utf-8", errors="replace")


def amount(size: int) -> str:
    """Returns a number of bytes as text, in a unit that suits it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 2**10:.1f} KiB"
