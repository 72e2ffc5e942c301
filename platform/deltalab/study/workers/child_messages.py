"""The messages between a worker and its child, and the state that the child writes while a stack trains."""

import json
import os
import socket
import struct
from typing import Any, NamedTuple


class ChildState(NamedTuple):
    """The present activity of a child. Times are those of `time.monotonic`.

    Attributes:
        since: When the activity `what` began.
        ends: The deadline of the stack.
        typical: The median time of a step in seconds; infinite while fewer than 3 steps are known.
        step: The steps that are done.
        steps: The steps of the training.
        seconds: The seconds that end it; 0 if steps alone do.
        what: The name of the activity.
    """

    since: float
    ends: float
    typical: float
    step: int
    steps: int
    seconds: float
    what: str


_LAYOUT = struct.Struct("dddqqd40s")
_SIGNAL = struct.Struct("q")


def write_state(file: int, state: ChildState) -> None:
    """Writes a child's state into an open file."""
    os.pwrite(file, _LAYOUT.pack(*state[:-1], state.what.encode()), 0)


def read_state(file: int) -> ChildState:
    """Reads the state that `write_state` wrote."""
    since, ends, typical, step, steps, seconds, what = _LAYOUT.unpack(os.pread(file, _LAYOUT.size, 0))
    return ChildState(since, ends, typical, step, steps, seconds, what.rstrip(b"\0").decode())


def write_signal(file: int, number: int) -> None:
    """Writes, beside a child's state, the number of a signal that the child is about to send to its own process.

    Args:
        file: The descriptor of the file for the child's state.
        number: The signal's number; 0 for none.
    """
    os.pwrite(file, _SIGNAL.pack(number), _LAYOUT.size)


def read_signal(file: int) -> int:
    """Reads the number that `write_signal` wrote last."""
    (number,) = _SIGNAL.unpack(os.pread(file, _SIGNAL.size, _LAYOUT.size))
    return int(number)


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message between a worker and its child, as one line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")
