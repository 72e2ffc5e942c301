"""Handles signals that ask a driver to stop: the first ends the study in order, a second ends the process at once."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_seen: list[int] = []


@contextmanager
def in_order() -> Iterator[None]:
    """Lets the first SIGINT raise `KeyboardInterrupt` in this block, and others `SystemExit(128 + number)`.

    The others are SIGTERM, SIGQUIT, and SIGHUP, which comes when a terminal closes. A SIGHUP that is ignored, as under
    nohup, stays so.

    The exception is raised in the main thread, whatever it executes, so that every `finally` runs: workers end,
    checkpoints stay, and the study becomes "interrupted". A second signal ends the process at once, with exit code 128
    + number. The ledger then still names the dead driver, as the next run finds out. Outside of the main thread, where
    Python handles no signals, the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    if (handler := signal.getsignal(signal.SIGHUP)) != signal.SIG_IGN:
        before[signal.SIGHUP] = handler
    _seen.clear()
    for number in before:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    """Handles a signal: raises for the first one, and ends the process for the second."""
    if _seen:
        os._exit(128 + number)
    _seen.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
