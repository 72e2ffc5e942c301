"""Waits while a database cannot be used: its server restarts, its disk is full, or another process holds a lock."""

import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from deltalab import progress
from deltalab.errors import InputError

PATIENCE_SECONDS = 300.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0


class Outage(InputError):
    """The database cannot be used now, and may be later."""

    kind = "outage"


class Patience:
    """How long the operations of a ledger wait for its database.

    If several threads wait, only the first of them prints a line on stderr.

    Attributes:
        seconds: The longest wait; 0 tries each operation once.
        gave_up: Whether an operation has waited in vain. From then on, operations do not wait, until one succeeds.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.gave_up = False
        self._lock = threading.Lock()
        self._waiting = 0

    def began(self, outage: Outage) -> None:
        """Counts an operation that starts to wait."""
        with self._lock:
            self._waiting += 1
            if self._waiting == 1 and self.seconds and not self.gave_up:
                progress.note(f"{outage}; waiting for the database, up to {_duration(self.seconds)}")

    def ended(self, after: float | None) -> None:
        """Counts an operation that has stopped waiting.

        Args:
            after: The seconds until the operation succeeded; None if it failed.
        """
        with self._lock:
            self._waiting -= 1
            if after is not None and not self._waiting:
                progress.note(f"the database is back after {after:.0f} s")


class Patient(Protocol):
    """An object with patience, such as a ledger. An operation that waits takes it as its first argument."""

    @property
    def patience(self) -> Patience:
        """How long an operation waits."""
        ...


L = TypeVar("L", bound=Patient)
P = ParamSpec("P")
T = TypeVar("T")


def waited(operation: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Makes an operation of a ledger wait for its database: it runs again until it succeeds or patience ends.

    The operation is one transaction, and running it a second time must change nothing: if the connection was lost
    during the commit, nobody knows whether the first try was kept. It raises `InputError` when patience ends.
    """

    @wraps(operation)
    def patient(ledger: L, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            result = operation(ledger, *args, **kwargs)
        except Outage as outage:
            result = _again(ledger.patience, outage, lambda: operation(ledger, *args, **kwargs))
        ledger.patience.gave_up = False
        return result

    return patient


def _again(patience: Patience, outage: Outage, operation: Callable[[], T]) -> T:
    """Tries an operation again, after growing pauses, until it succeeds or patience ends."""
    start, pause, after = time.monotonic(), FIRST_PAUSE, None
    patience.began(outage)
    try:
        while True:
            left = 0.0 if patience.gave_up else start + patience.seconds - time.monotonic()
            if left <= 0:
                patience.gave_up = True
                waiting = f"; waited {_duration(patience.seconds)} for the database" if patience.seconds else ""
                raise InputError(f"{outage}{waiting}") from None
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)
            try:
                result = operation()
            except Outage as error:
                outage = error
            else:
                after = time.monotonic() - start
                return result
    finally:
        patience.ended(after)


def _duration(seconds: float) -> str:
    """Returns seconds as text.

    >>> _duration(300), _duration(0.5)
    ('5 min', '0.5 s')
    """
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
