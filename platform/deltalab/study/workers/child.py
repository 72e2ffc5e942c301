"""The child of a worker, which trains the stacks that the worker sends, and shows by its pulse that it goes on."""

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
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from deltalab import plugin_files, registry
from deltalab.study.workers.child_messages import ChildState, send, write_signal, write_state
from deltalab.study.workers.jobs import Lost, record_to_json, stack_from_json
from deltalab.study.workers.train_stack import execute
from deltalab.training.beat import STEP

MOST_TIMED = 3 * 2**9
"""The most steps of which the median time is taken."""


class Pulse:
    """Writes down each beat of a stack's training, for the worker to read.

    Attributes:
        file: The descriptor of the file for the child's state.
        steps: The steps of the training.
        seconds: The seconds that end it; 0 if steps alone do.
    """

    def __init__(self, file: int, steps: int, seconds: float | None = None) -> None:
        """Begins before the first beat."""
        self.file, self.steps, self.seconds = file, steps, seconds or 0.0
        self._durations: list[float] = []
        self._typical = math.inf
        self._last: tuple[str, int, float] = "", 0, 0.0

    def __call__(self, what: str, step: int | None = None, ends: float = math.inf) -> None:
        """Notes what the child does now.

        Args:
            what: What the child does.
            step: The steps that are done; None if their number is as before.
            ends: The deadline of the stack, by `time.monotonic`.
        """
        now = time.monotonic()
        before, done, since = self._last
        if before == STEP:
            self._learn(now - since)
        done = done if step is None else step
        self._last = what, done, now
        write_state(self.file, ChildState(now, ends, self._typical, done, self.steps, self.seconds, what))

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


def note_own_signals(file: int) -> None:
    """Writes down each signal that this process sends to itself or to its fork server, before the signal is sent.

    The kernel tells a worker by which signal its child ended, and not who sent the signal. A signal that no function of
    Python sent, such as that of a program `kill`, is not seen here. The functions are replaced, since an audit hook
    would run at each `id` of torch's.

    Args:
        file: The descriptor of the file for the child's state.
    """
    mine = {os.getpid(), 0, -1, -os.getpid(), os.getppid()}

    def noting(sends: Callable[[int, int], None]) -> Callable[[int, int], None]:
        @wraps(sends)
        def send_noted(target: int, number: int) -> None:
            if sends is pthread_kill or target in mine:
                write_signal(file, int(number))
            sends(target, number)

        return send_noted

    pthread_kill = signal.pthread_kill
    os.kill, os.killpg, signal.pthread_kill = noting(os.kill), noting(os.killpg), noting(pthread_kill)
    signal.raise_signal = lambda signalnum, /: os.kill(os.getpid(), signalnum)


def preload() -> None:
    """Imports, in the fork server, what every child needs: this module, and the rules and tasks that are installed.

    Otherwise torch would import some of its modules at the first training, which takes seconds.
    """
    for name in ("torch._dynamo", "torch.utils.serialization"):
        importlib.import_module(name)
    with contextlib.suppress(Exception):  # The child tells of a plugin that does not import, if a job asks for it.
        registry.list_rules()
        registry.list_tasks()


def main(connected: int, printed: int, pulse: int) -> None:
    """Trains stacks until the worker closes the connection.

    Args:
        connected: The descriptor of the connection to the worker.
        printed: The descriptor to which both output streams go, for the worker to read.
        pulse: The descriptor of the file for the child's state.
    """
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
    note_own_signals(pulse)
    connection = socket.socket(fileno=connected)
    lines = connection.makefile("rb")
    first = lines.readline()
    if not first:
        return
    worker = json.loads(first)
    plugin_files.watched = True
    os.environ.clear()
    os.environ.update(worker["environment"])
    sys.path[:] = worker["path"]
    os.chdir(worker["folder"])
    logging.getLogger("deltalab").addHandler(_ToWorker(connection))
    for line in lines:
        send(connection, _answer(json.loads(line)["stack"], worker, pulse, connection))


def _answer(text: str, worker: dict[str, Any], pulse: int, connection: socket.socket) -> dict[str, Any]:
    """Trains a stack, and returns the message that tells the worker what became of it."""
    stack = stack_from_json(text)
    train = stack[0].config["train"]
    try:
        records = execute(
            stack,
            Path(worker["runs"]),
            threads=worker["threads"],
            watch=lambda step: send(connection, {"step": step}),
            on=lambda device: send(connection, {"device": device}),
            beat=Pulse(pulse, train["steps"], train.get("seconds")),
        )
    except Lost as lost:
        return {"lost": str(lost), "of": lost.of}
    except BaseException:
        # Only a rule can have raised this, be it KeyboardInterrupt.
        return {"lost": traceback.format_exc(), "of": "trial"}
    finally:
        sys.stdout.flush()
    return {"records": [record_to_json(record) for record in records]}
