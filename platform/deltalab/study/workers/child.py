"""The child of a worker: trains the stacks that it is sent, and shows by its pulse that it has not come to a halt."""

import contextlib
import faulthandler
import importlib
import json
import logging
import math
import os
import signal
import socket
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from deltalab import registry
from deltalab.study.workers.child_messages import Beat, send, write_beat
from deltalab.study.workers.jobs import Lost, stack_from_json, to_json
from deltalab.study.workers.train_stack import execute
from deltalab.training.beat import STEP

MOST_TIMED = 3 * 2**9
"""Steps of which the median is taken."""


class Pulse:
    """Writes down each beat of a stack's training, for the worker to read."""

    def __init__(self, file: int, steps: int) -> None:
        self.file, self.steps = file, steps
        self._durations: list[float] = []
        self._typical = math.inf
        self._last: tuple[str, int, float] = "", 0, 0.0

    def __call__(self, what: str, step: int | None = None, ends: float = math.inf) -> None:
        now = time.monotonic()
        before, done, since = self._last
        if before == STEP:
            self._learn(now - since)
        done = done if step is None else step
        self._last = what, done, now
        write_beat(self.file, Beat(now, ends, self._typical, done, self.steps, what))

    def _learn(self, seconds: float) -> None:
        """Takes the median of the first 3, 6, 12, ... 1536 steps."""
        if len(self._durations) < MOST_TIMED:
            self._durations.append(seconds)
            count = len(self._durations)
            if count % 3 == 0 and (count // 3).bit_count() == 1:
                self._typical = statistics.median(self._durations)


class _ToWorker(logging.Handler):
    """Sends what the training logs to the worker, which logs it in the driver."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        send(self._connection, {"log": [record.levelno, record.getMessage()]})


def preload() -> None:
    """Imports, in the fork server, what every child needs: this module, and the rules and tasks that are installed.

    torch imports some of its modules at the first training, which takes seconds.
    """
    for name in ("torch._dynamo", "torch.utils.serialization"):
        importlib.import_module(name)
    with contextlib.suppress(Exception):  # who asks for one that does not import is told by the child
        registry.list_rules()
        registry.list_tasks()


def main(connected: int, printed: int, pulse: int) -> None:
    """Trains stacks until the worker closes the connection. Both output streams go where the worker reads them."""
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.close(printed)
    for descriptor in (connected, pulse):
        os.set_inheritable(descriptor, False)
    sys.stdout, sys.stderr = (
        open(stream, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        for stream in (1, 2)
    )
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    connection = socket.socket(fileno=connected)
    lines = connection.makefile("rb")
    first = lines.readline()
    if not first:
        return
    given = json.loads(first)
    registry.watched = True
    os.environ.clear()
    os.environ.update(given["environment"])
    sys.path[:] = given["path"]
    os.chdir(given["folder"])
    logging.getLogger("deltalab").addHandler(_ToWorker(connection))
    for line in lines:
        send(connection, _answer(json.loads(line)["stack"], given, pulse, connection))


def _answer(text: str, given: dict[str, Any], pulse: int, connection: socket.socket) -> dict[str, Any]:
    stack = stack_from_json(text)
    try:
        records = execute(
            stack,
            Path(given["runs"]),
            threads=given["threads"],
            watch=lambda step: send(connection, {"step": step}),
            on=lambda device: send(connection, {"device": device}),
            beat=Pulse(pulse, stack[0].config["train"]["steps"]),
        )
    except Lost as lost:
        return {"lost": str(lost), "of": lost.of}
    except BaseException:
        # Whatever a rule raised, such as KeyboardInterrupt: nobody else raises here.
        return {"lost": traceback.format_exc(), "of": "trial"}
    finally:
        sys.stdout.flush()
    return {"records": [to_json(record) for record in records]}
