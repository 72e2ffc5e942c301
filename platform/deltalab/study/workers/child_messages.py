"""What a worker and its child tell each other while a stack trains."""

import json
import os
import socket
import struct
from typing import Any, NamedTuple


class Beat(NamedTuple):
    """What a child does now.

    since: when it began. ends: the deadline of its stack. Both by `time.monotonic`.
    typical: the median time of a step, in seconds; infinite as long as fewer than 3 are known.
    """

    since: float
    ends: float
    typical: float
    step: int
    steps: int
    what: str


_LAYOUT = struct.Struct("dddqq40s")


def write_beat(file: int, beat: Beat) -> None:
    os.pwrite(file, _LAYOUT.pack(*beat[:-1], beat.what.encode()), 0)


def read_beat(file: int) -> Beat:
    since, ends, typical, step, steps, what = _LAYOUT.unpack(os.pread(file, _LAYOUT.size, 0))
    return Beat(since, ends, typical, step, steps, what.rstrip(b"\0").decode())


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends one line of JSON, between a worker and its child."""
    connection.sendall(json.dumps(message).encode() + b"\n")
