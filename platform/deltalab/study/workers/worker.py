"""Executes stacks in a child process and watches it, so that the study goes on whatever a rule does to its process.

The child is killed if a step hangs, or if it takes more memory than its share. Every end of a child has a reason, and
is laid either to the trial, which then failed, or to the infrastructure, after which the same stack runs again.
"""

import contextlib
import json
import logging
import math
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from deltalab.store import TrialRecord
from deltalab.study.workers.child_messages import (
    ChildState,
    read_signal,
    read_state,
    send,
    write_signal,
    write_state,
)
from deltalab.study.workers.fork_server import fork_server, search_path
from deltalab.study.workers.jobs import IMPORTING, Job, Lost, forget_checkpoint, late, record_from_json, stack_to_json
from deltalab.study.workers.printed_output import PrintedOutput
from deltalab.training.beat import EVALUATION, FIRST_STEPS, STEP
from deltalab.training.time_budget import reached

_log = logging.getLogger("deltalab")

FACTOR = 100.0
"""A step may take this many times as long as the median step of its stack."""

FLOOR = 60.0
"""Seconds that a step may always take, however short the median step is."""

PATIENCE = 900.0
"""Seconds for work whose time is not known: data, evaluations, and the first steps, which compile kernels."""

IMPORTS = 120.0
"""Seconds for the imports of a rule and a task."""

GRACE = 5.0
"""Seconds for a trial that is past its deadline to come to its next step, at which it ends by itself."""

POLL = 0.1
"""Seconds between two looks at the child's pulse and memory."""

TELLS = 1.0
"""Seconds between two reports of a stack's step."""

SHARED = 0.9
"""The part of a machine's memory that its workers share; the driver, Ray and the system have the rest."""

SURE = 2.0
"""Seconds for which a child must be seen to be late: all children look late after a pause of the whole machine."""

STILL = 60.0
"""Seconds for which a child may be seen to be stopped, as by SIGSTOP, before its stack is lost."""

DIES = 5.0
"""Seconds to wait for the end of a child that is killed."""

TAKES = 300.0
"""Seconds for a child to take a stack, and for the fork server to import torch before the first one."""

PRINTED = "printed.log"
"""The name of the file in the folder of weights that has what stacks print."""

LAST_WORDS = 8000
"""How many of the last characters that a child printed the record of its end keeps."""

Watch = Callable[[int], None]
"""Called with the step that a stack has reached."""

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals that no crash sends."""

_STOPS = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
"""Signals that stop a process."""


def share(places: int) -> int:
    """The memory for each worker in bytes: an equal share of this machine, or of the control group that limits it.

    Args:
        places: The workers of the machine.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        # The file is of another version of control groups, or says "max".
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((Path("/sys/fs/cgroup") / file).read_text()))
    return int(SHARED * total / places)


class _Doubtful(Lost):
    """A loss that may stem from an earlier stack of the same child, or from an event since that stack."""


class Worker:
    """One place of a study: executes one stack at a time in a child, which starts when it is first needed.

    `close` ends the child.

    Attributes:
        runs: The folder of weights and checkpoints.
        threads: The threads of a trial.
        memory: Bytes that a stack may use.
        device: The name of the device on which stacks train; None before the first stack.
        printed: What stacks print.
    """

    def __init__(self, runs: Path, *, threads: int = 1, memory: int | None = None) -> None:
        """Begins without a child.

        Args:
            runs: The folder of weights and checkpoints.
            threads: The threads of a trial.
            memory: Bytes that a stack may use; None for the share of the only worker of this machine.
        """
        self.runs, self.threads = runs.absolute(), threads
        self.memory = share(1) if memory is None else memory
        self.device: str | None = None
        self.printed = PrintedOutput(self.runs / PRINTED)
        self._child: _Child | None = None

    def execute(
        self, stack: Sequence[Job], watch: Watch | None = None, between: Watch | None = None
    ) -> list[TrialRecord]:
        """Trains jobs as one in the child, as `train_stack.execute` describes.

        Args:
            stack: The jobs.
            watch: Called with the step at every evaluation.
            between: Called with the step once a second between evaluations; `watch` if None.

        Returns:
            A record of each job, also of jobs that failed.

        Raises:
            Lost: The child ended, or had to be ended.
        """
        fresh = self._child is None
        lost = self._tried(stack, watch, between or watch)
        if isinstance(lost, _Doubtful) and not fresh:
            self.close()
            lost = self._tried(stack, watch, between or watch)
        if not isinstance(lost, Lost):
            return lost
        if lost.of == "trial" and len(stack) > 1:
            forget_checkpoint(stack, self.runs)
        raise lost

    def _tried(self, stack: Sequence[Job], watch: Watch | None, between: Watch | None) -> list[TrialRecord] | Lost:
        """Trains jobs as one, in a single try. Returns their records, or why they are lost."""
        try:
            child = self._child = self._child or _Child(self)
            child.begin(stack)
        except OSError as error:
            self.close()
            return _Doubtful(f"the worker's process does not start: {error}", "infrastructure")
        try:
            return child.finish(stack, watch, between)
        except Lost as lost:
            return lost
        finally:
            child.hear_out()
            if not child.idle:
                self.close()

    def close(self) -> None:
        """Ends the child, at once."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> Self:
        """Returns the worker, which the end of the block closes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the child."""
        self.close()


class _Child:
    """A worker's process.

    Attributes:
        worker: The worker.
        idle: Whether the process waits for a stack.
    """

    def __init__(self, worker: Worker) -> None:
        self.worker, self.idle = worker, True
        self._pulse: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._connection, of_child = socket.socketpair()
        self._printed, prints = os.pipe()
        self._told, tells = os.pipe()
        os.set_blocking(self._printed, False)
        self._sources: list[Any] = [self._connection, self._told, self._printed]
        self._received, self._words = b"", ""
        self._pid: int | None = None
        self._late_since: float | None = None
        self._still = 0
        try:
            fork_server().fork([of_child.fileno(), prints, self._pulse.fileno(), tells])
        finally:
            of_child.close()
            os.close(prints)
            os.close(tells)
        self._send(
            {
                "environment": dict(os.environ),
                "path": search_path(),
                "folder": os.getcwd(),
                "runs": str(worker.runs),
                "threads": worker.threads,
            },
        )

    def begin(self, stack: Sequence[Job]) -> None:
        """Sends a stack. Raises `OSError` if the child has ended or does not take the stack."""
        train = stack[0].config["train"]
        begins = ChildState(
            time.monotonic(), math.inf, math.inf, 0, train["steps"], train.get("seconds") or 0.0, "starting"
        )
        write_state(self._pulse.fileno(), begins)
        write_signal(self._pulse.fileno(), 0)
        self._words, self._late_since, self._still = "", None, 0
        first = stack[0]
        name = f"{first.arm} on {first.task}, candidate {first.number}, trial {first.key[:12]}"
        self.worker.printed.begin(name)
        self._send({"stack": stack_to_json(stack)})
        self.idle = False

    def finish(self, stack: Sequence[Job], watch: Watch | None, between: Watch | None) -> list[TrialRecord]:
        """Waits for the stack's records. Raises `Lost` if there will be none."""
        looked = told = time.monotonic()
        while True:
            ready, _, _ = select.select(self._sources, [], [], POLL)
            self._listen()
            status = self._heard() if self._told in ready else None
            for message in self._messages():
                if "step" in message and watch is not None:
                    watch(message["step"])
                if "device" in message:
                    self.worker.device = message["device"]
                if "log" in message:
                    _log.log(*message["log"])
                if "records" in message:
                    self.idle = True
                    return list(map(record_from_json, message["records"]))
                if "lost" in message:
                    self.idle = message["of"] == "infrastructure"
                    raise Lost(message["lost"], message["of"])
            if status is not None:
                raise self._ended(status)
            if time.monotonic() - looked >= POLL:
                step = self._look(stack[0])
                looked = time.monotonic()
                if between is not None and step and looked - told >= TELLS:
                    between(step)
                    told = looked

    def hear_out(self) -> None:
        """Reads what the child printed since it was last heard, and says how much a stack printed in all."""
        self._listen()
        self.worker.printed.end()

    def kill(self) -> None:
        """Ends the child and every process that it started."""
        self._connection.close()  # A child that waits for a stack ends by itself.
        if self._pid is None and select.select([self._told], [], [], 0)[0]:
            self._heard()
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            select.select([self._told], [], [], DIES)  # Until its end the child may still write a checkpoint.
        os.close(self._printed)
        os.close(self._told)
        self._pulse.close()

    def _send(self, message: dict[str, Any]) -> None:
        """Sends a message, which the child must take within `TAKES` seconds."""
        self._connection.settimeout(TAKES)
        send(self._connection, message)
        self._connection.setblocking(False)

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the messages that have come in whole."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._connection.recv(2**16):
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def _heard(self) -> str | None:
        """Reads what the fork server tells: first the child's process id, then how the child ended.

        Returns the exit code or minus the signal, an empty text if the server itself has ended, or None while the
        child runs.
        """
        *lines, _ = os.read(self._told, 64).decode().split("\n")
        if self._pid is None and lines:
            self._pid = int(lines.pop(0))
            return lines[0] if lines else None
        return lines[0] if lines else ""

    def _listen(self) -> None:
        """Reads what the child printed."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._printed, 2**16)
            if data:
                self._words = (self._words + data.decode(errors="replace"))[-LAST_WORDS:]
                self.worker.printed.take(data, show=self._late_since is None)
            elif self._printed in self._sources:
                self._sources.remove(self._printed)  # The rule has closed its output.

    def _ended(self, status: str) -> Lost:
        """Says why the child ended, though the worker did not end it."""
        self._listen()
        state = read_state(self._pulse.fileno())
        words = self._words and f"{self._words.strip()}\n"
        if status == "":
            if number := read_signal(self._pulse.fileno()):
                return Lost(
                    f"{words}the rule or the task sent {_name(number)} to the fork server, {_at(state)}", "trial"
                )
            return Lost(f"the fork server was killed, {_at(state)}", "infrastructure")
        if (code := int(status)) >= 0:
            return Lost(f"{words}the rule or the task ended the process with os._exit({code}), {_at(state)}", "trial")
        number, name = -code, _name(-code)
        if number in _FROM_OUTSIDE and number == read_signal(self._pulse.fileno()):
            return Lost(f"{words}the rule or the task sent its own process {name}, {_at(state)}", "trial")
        if number in _FROM_OUTSIDE:
            return Lost(f"the process was killed by {name}, {_at(state)}", "infrastructure", _computing(state))
        return _Doubtful(f"{words}the rule or the task ended the process by {name}, {_at(state)}", "trial")

    def _look(self, job: Job) -> int:
        """The step that the child has reached. Raises `Lost` if the child takes too long or too much memory."""
        state, now = read_state(self._pulse.fileno()), time.monotonic()
        if self._pid is None and now - state.since > TAKES:
            fork_server().close()
            raise Lost(f"the fork server starts no process within {TAKES:.0f} s", "infrastructure")
        used, letter = self._use()
        if used > self.worker.memory:
            raise _Doubtful(
                f"out of memory: the process used {_gib(used)} of the {_gib(self.worker.memory)} that a stack may use, "
                f"{_at(state)}; resources: {{memory: GIB}} in the study's file gives it more",
                "trial",
            )
        self._still = self._still + 1 if letter == "T" else 0
        stops = read_signal(self._pulse.fileno()) in _STOPS
        # Looks are counted, and not seconds, in which this process may have stood still, too.
        if self._still * POLL >= (SURE if stops else STILL):
            if stops:
                raise Lost(f"the rule or the task stopped its own process, {_at(state)}", "trial")
            raise Lost(f"the process is stopped, {_at(state)}", "infrastructure", _computing(state))
        # A step of a stack trains many trials at once, and still may not take longer than the deadline of one trial.
        deadline = min(state.ends, state.since + (job.deadline or math.inf)) + GRACE
        if now < min(deadline, state.since + _patience(state)):
            self._late_since = None
            return state.step
        if self._late_since is None:
            self._late_since = now
        if now - self._late_since < SURE:
            return state.step
        ago = f"{now - state.since:.0f} s ago"
        if letter in ("T", "t", "D"):
            waits = "waits for a disk" if letter == "D" else "is stopped"
            raise Lost(f"the process {waits}, {_at(state)}, which began {ago}", "infrastructure")
        why = f"{late(job, state.step)} ({state.what})" if now >= deadline else f"the process hangs, {_at(state)}"
        raise Lost(f"{self._traceback()}{why}, which began {ago}", "trial")

    def _traceback(self) -> str:
        """Asks the child for its present traceback, as Python's `faulthandler` prints it."""
        self._words = ""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
        until = time.monotonic() + 1
        while time.monotonic() < until and "<module>" not in self._words:
            select.select([self._printed], [], [], POLL)
            self._listen()
        return self._words and f"{self._words.strip()}\n"

    def _use(self) -> tuple[int, str]:
        """What Linux tells of the child: 0 bytes and an empty text if it tells nothing.

        Returns:
            The bytes that are anonymous, shared memory or swapped, and the letter of the process's state, such as T for
            a stopped process.
        """
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
            used = (int(fields[name][0]) for name in ("RssAnon", "RssShmem", "VmSwap") if name in fields)
            return 1024 * sum(used), fields["State"][0]
        return 0, ""


def _patience(state: ChildState) -> float:
    """Seconds that a child may spend on its present activity."""
    if state.what == IMPORTING:
        return IMPORTS
    if state.typical == math.inf:
        return PATIENCE
    usual = FACTOR * state.typical
    return max(FLOOR if state.what == STEP else PATIENCE, usual)


def _at(state: ChildState) -> str:
    """Where in its training a child is, for a message."""
    return f"at {reached(state.step, state.steps, state.seconds or None)} ({state.what})"


def _computing(state: ChildState) -> str | None:
    """Where in its training a child is while the rule or the task computes; None while neither does."""
    return _at(state) if state.what in (STEP, FIRST_STEPS, EVALUATION) else None


def _name(number: int) -> str:
    """Names a signal, such as "SIGTERM (Terminated)"."""
    short = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    return f"{short} ({signal.strsignal(number)})"


def _gib(size: float) -> str:
    """A number of bytes in GiB."""
    return f"{size / 2**30:.2f} GiB"
