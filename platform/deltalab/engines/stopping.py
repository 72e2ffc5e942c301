"""Ends an engine with all of its processes, also when a signal ends the command that started it."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
GRACE_SECONDS = 15.0
"""How long processes may take to end by themselves after SIGTERM."""

Process = tuple[int, str]
"""The id of a process and its start time, which together are never used again."""


@contextmanager
def signals_raise() -> Iterator[None]:
    """Lets the first SIGINT raise `KeyboardInterrupt` in this block, and SIGTERM and SIGHUP `SystemExit(128 + number)`.

    Later signals are ignored, so that they cannot interrupt the ending of an engine. A signal that was ignored before,
    as `nohup` does, stays so. Outside of the main thread, where Python handles no signals, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    """Handles the first signal."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def end(child: subprocess.Popen[bytes]) -> None:
    """Ends a process and all processes below it: by SIGTERM, and after `GRACE_SECONDS` by SIGKILL.

    torchrun starts each worker in a session of its own, so that signals to a process group do not reach them.
    """
    family = _family(child.pid)  # once a parent has ended, its children can no longer be found
    _send(signal.SIGTERM, family)
    until = time.monotonic() + GRACE_SECONDS
    while _alive(family) and time.monotonic() < until:
        child.poll()
        time.sleep(0.1)
    _send(signal.SIGKILL, family | {process for pid, _ in _alive(family) for process in _family(pid)})
    child.wait()


def _running() -> dict[Process, int]:
    """Returns the processes of this machine that run, each with the id of its parent."""
    found: dict[Process, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            state, parent, *rest = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if state not in "ZX":  # a zombie waits for its parent alone
                found[int(file.parent.name), rest[17]] = int(parent)
    return found


def _family(pid: int) -> set[Process]:
    """Returns a process and all processes below it."""
    running = _running()
    found = {process for process in running if process[0] == pid}
    while more := {child for child, parent in running.items() if parent in {pid for pid, _ in found}} - found:
        found |= more
    return found


def _alive(family: set[Process]) -> set[Process]:
    """Returns the processes of a family that still run."""
    return family & _running().keys()


def _send(number: signal.Signals, family: set[Process]) -> None:
    """Sends a signal to the processes of a family that still run."""
    for pid, _ in _alive(family):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
