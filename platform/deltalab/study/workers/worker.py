"""Executes stacks in a child process that is watched: whatever a rule does to its process, the study goes on.

The child is killed where a step hangs or where it takes more memory than its share. Every end has a name, and an owner:
the trial, which then failed, or the infrastructure, after which the same stack runs again.
"""

import contextlib
import json
import logging
import math
import os
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from deltalab.store import TrialRecord
from deltalab.study.workers.child_messages import Beat, read_beat, send, write_beat
from deltalab.study.workers.fork_server import fork_server, search_path
from deltalab.study.workers.jobs import IMPORTING, Job, Lost, forget_checkpoint, from_json, late, stack_to_json
from deltalab.training.beat import STEP

_log = logging.getLogger("deltalab")

FACTOR = 100.0
"""A step may take so many times the median step of its stack,"""

FLOOR = 60.0
"""at least so many seconds."""

PATIENCE = 900.0
"""Seconds for what nothing compares to: data, the first steps, which compile kernels, evaluations."""

IMPORTS = 120.0
"""Seconds for the imports of a rule and a task."""

GRACE = 5.0
"""Seconds for a trial that is past its deadline to come to its next step, where it ends by itself."""

POLL = 0.1
"""Seconds between two looks at the child's pulse and memory."""

TELLS = 1.0
"""Seconds between two words about a stack's step."""

SHARED = 0.9
"""The part of a machine's memory that its workers share; the driver, Ray and the system have the rest."""

SURE = 2.0
"""Seconds for which a child must be seen to be late: after a pause of the whole machine, all children are."""

DIES = 5.0
"""Seconds to wait for the end of a child that is killed."""

TAKES = 300.0
"""Seconds for a child to take a stack, and for the fork server to import torch before the first one."""

LAST_WORDS = 8000
"""Characters of what a child printed last that the record of its end keeps."""

Watch = Callable[[int], None]

_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
"""Signals that no crash sends."""


def share(places: int) -> int:
    """The bytes of memory for each of so many workers of this machine, or of the control group that limits it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # not this version of control groups, or "max"
            total = min(total, int((Path("/sys/fs/cgroup") / file).read_text()))
    return int(SHARED * total / places)


class _Doubtful(Lost):
    """A loss that an earlier stack of the same process may have caused, or something that happened since then."""


class Worker:
    """One place of a study: executes one stack at a time in its child, which it starts when it is first needed.

    runs: the folder of weights and checkpoints. threads: of a trial. memory: bytes that a stack may use; None is the
    share of the only worker of this machine. device: the name of what its stacks train on, None before the first one.
    Close it in the end: the child ends then.
    """

    def __init__(self, runs: Path, *, threads: int = 1, memory: int | None = None) -> None:
        self.runs, self.threads = runs.absolute(), threads
        self.memory = share(1) if memory is None else memory
        self.device: str | None = None
        self._child: _Child | None = None

    def execute(
        self, stack: Sequence[Job], watch: Watch | None = None, between: Watch | None = None
    ) -> list[TrialRecord]:
        """Trains jobs as one and returns a record of each, failed ones included; see `trial.execute`.

        watch: called at every evaluation with the step. between: called with it once a second between evaluations;
        None is `watch`. Raises `Lost` where the child ended, or had to be ended.
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
            if not child.idle:
                self.close()

    def close(self) -> None:
        """Ends the child, at once."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Child:
    """A worker's process, and what it says. idle: whether it waits for a stack."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.idle = worker, True
        self._pulse: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._connection, theirs = socket.socketpair()
        self._printed, prints = os.pipe()
        self._told, tells = os.pipe()
        os.set_blocking(self._printed, False)
        self._sources: list[Any] = [self._connection, self._told, self._printed]
        self._received, self._words = b"", ""
        self._pid: int | None = None
        self._late_since: float | None = None
        try:
            fork_server().fork([theirs.fileno(), prints, self._pulse.fileno(), tells])
        finally:
            theirs.close()
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
        """Sends a stack. Raises `OSError` where the child has ended, or does not take it."""
        steps = stack[0].config["train"]["steps"]
        write_beat(self._pulse.fileno(), Beat(time.monotonic(), math.inf, math.inf, 0, steps, "starting"))
        self._words, self._late_since = "", None
        self._send({"stack": stack_to_json(stack)})
        self.idle = False

    def finish(self, stack: Sequence[Job], watch: Watch | None, between: Watch | None) -> list[TrialRecord]:
        """Waits for the stack's records. Raises `Lost`."""
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
                    return list(map(from_json, message["records"]))
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

    def kill(self) -> None:
        """Ends the child, with all that it started."""
        self._connection.close()  # one that waits for a stack ends by itself
        if self._pid is None and select.select([self._told], [], [], 0)[0]:
            self._heard()
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            select.select([self._told], [], [], DIES)  # until then it may still write a checkpoint
        os.close(self._printed)
        os.close(self._told)
        self._pulse.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.settimeout(TAKES)
        send(self._connection, message)
        self._connection.setblocking(False)

    def _messages(self) -> list[dict[str, Any]]:
        """The messages that have come in whole."""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._connection.recv(2**16):
                self._received += data
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def _heard(self) -> str | None:
        """Reads what the fork server tells: first the child's process id, then how it ended.

        Returns that exit code, or minus the signal; "" where the server itself has ended.
        """
        *lines, _ = os.read(self._told, 64).decode().split("\n")
        if self._pid is None and lines:
            self._pid = int(lines.pop(0))
            return lines[0] if lines else None
        return lines[0] if lines else ""

    def _listen(self) -> None:
        """Passes on to this process's stderr what the child printed."""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._printed, 2**16).decode(errors="replace")
            if not text and self._printed in self._sources:
                self._sources.remove(self._printed)  # the rule has closed its output
            self._words = (self._words + text)[-LAST_WORDS:]
            if self._late_since is None:
                sys.stderr.write(text)

    def _ended(self, status: str) -> Lost:
        """Says why the child has ended by itself."""
        self._listen()
        beat = read_beat(self._pulse.fileno())
        words = self._words and f"{self._words.strip()}\n"
        if status == "":
            return Lost(f"the fork server was killed, {_at(beat)}", "infrastructure")
        if (code := int(status)) >= 0:
            return Lost(f"{words}the rule or the task ended the process with os._exit({code}), {_at(beat)}", "trial")
        found = signal.Signals(-code)
        name = f"{found.name} ({signal.strsignal(found)})"
        if found in _FROM_OUTSIDE:
            return Lost(f"the process was killed by {name}, {_at(beat)}", "infrastructure")
        return _Doubtful(f"{words}the rule or the task ended the process by {name}, {_at(beat)}", "trial")

    def _look(self, job: Job) -> int:
        """The step that the child has reached. Raises `Lost` where it takes too long or too much."""
        beat, now = read_beat(self._pulse.fileno()), time.monotonic()
        if (used := self._memory()) > self.worker.memory:
            raise _Doubtful(
                f"out of memory: the process used {_gib(used)} of the {_gib(self.worker.memory)} that a stack may use, "
                f"{_at(beat)}; resources: {{memory: GIB}} in the study's file gives it more",
                "trial",
            )
        # Of a stack of many, too, no single step takes as long as a whole trial may take.
        deadline = min(beat.ends, beat.since + (job.deadline or math.inf)) + GRACE
        if now < min(deadline, beat.since + _patience(beat)):
            self._late_since = None
            return beat.step
        if self._late_since is None:
            self._late_since = now
        if now - self._late_since < SURE:
            return beat.step
        ago = f"{now - beat.since:.0f} s ago"
        if (state := self._state()) in ("T", "t", "D"):
            waits = "waits for a disk" if state == "D" else "is stopped"
            raise Lost(f"the process {waits}, {_at(beat)}, which began {ago}", "infrastructure")
        why = f"{late(job, beat.step)} ({beat.what})" if now >= deadline else f"the process hangs, {_at(beat)}"
        raise Lost(f"{self._traceback()}{why}, which began {ago}", "trial")

    def _traceback(self) -> str:
        """Where the child is, as Python's `faulthandler` tells."""
        self._words = ""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGUSR1)
        until = time.monotonic() + 1
        while time.monotonic() < until and "<module>" not in self._words:
            select.select([self._printed], [], [], POLL)
            self._listen()
        return self._words and f"{self._words.strip()}\n"

    def _memory(self) -> int:
        """The bytes that no other process shares: anonymous, shared memory, swapped. 0 if the system tells none."""
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{self._pid}/status").read_text().splitlines()
            fields = (line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")))
            return sum(int(kib) * 1024 for _, kib, _ in fields)
        return 0

    def _state(self) -> str:
        """The state as Linux abbreviates it, such as T for a stopped process; "" if the system tells none."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        return ""


def _patience(beat: Beat) -> float:
    """Seconds that what a child does may take."""
    if beat.what == IMPORTING:
        return IMPORTS
    if beat.typical == math.inf:
        return PATIENCE
    usual = FACTOR * beat.typical
    return max(FLOOR if beat.what == STEP else PATIENCE, usual)


def _at(beat: Beat) -> str:
    return f"at step {beat.step} of {beat.steps} ({beat.what})"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
