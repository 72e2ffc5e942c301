"""Runs commands of the platform as processes, whose results, errors and progress are JSON.

A command in a process of its own reads the plugins' files as they are now, can be stopped, and prints where the
protocol of this process does not run.
"""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from deltalab.errors import InputError, unknown

State = Literal["running", "done", "failed", "refused", "stopped", "lost"]

MOST_BYTES = 2**20
"""The most bytes of JSON that a result may have."""
MOST_RUNNING = 4
"""The most processes that run at a time."""
NOTES = 20
"""How many notes of a process are told, the last ones."""
EVERY_SECONDS = 0.05
KILL_SECONDS = 60.0
"""Seconds after which a process that was asked to stop is killed."""


@dataclass
class Process:
    """A command that runs or has ended.

    Attributes:
        name: The name by which the client asks for it.
        words: The words of the command.
        child: The process.
        stdout: The file of its result.
        stderr: The file of its notes, progress and errors.
        began: When it began, in seconds of the monotonic clock.
        stopped: Why it was asked to stop; None if it was not.
        ended: When it was first seen to have ended; None while it runs.
    """

    name: str
    words: tuple[str, ...]
    child: "subprocess.Popen[bytes]"
    stdout: Path
    stderr: Path
    began: float
    stopped: str | None = None
    ended: float | None = None

    @property
    def state(self) -> State:
        """How the process stands, by its exit code: docs/reference/programs.md explains the codes."""
        code = self.child.poll()
        if code is None:
            return "running"
        self.ended = self.ended or time.monotonic()
        codes: dict[int, State] = {0: "done", 1: "failed", 2: "refused"}
        codes |= dict.fromkeys((129, 130, 131, 143), "stopped")
        return "stopped" if self.stopped and code else codes.get(code, "lost")

    async def wait(self, seconds: float) -> None:
        """Waits until the process has ended, at most so many seconds."""
        until = time.monotonic() + seconds
        while self.child.poll() is None and time.monotonic() < until:
            await asyncio.sleep(EVERY_SECONDS)

    def stop(self, why: str) -> None:
        """Asks the process to stop, as Ctrl-C does; kills it and its children if it does not within a minute."""
        if self.child.poll() is None and self.stopped is None:
            self.stopped = why
            self.child.send_signal(signal.SIGINT)
            kill = threading.Timer(KILL_SECONDS, self._kill)
            kill.daemon = True
            kill.start()

    def _kill(self) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)

    def told(self) -> dict[str, Any]:
        """Returns the state, what the process has told on its way, and its result or its error once it has ended."""
        state = self.state
        answer: dict[str, Any] = {"task": self.name, "state": state, "command": shlex.join(("deltalab", *self.words))}
        answer["seconds"] = round((self.ended or time.monotonic()) - self.began, 1)
        lines = self.stderr.read_text("utf-8", errors="replace").splitlines()
        entries = [entry for line in lines if isinstance(entry := _json(line), dict)]
        for kind in ("progress", "error"):
            if found := [entry[kind] for entry in entries if kind in entry]:
                answer[kind] = found[-1]
        if notes := [str(entry["note"]) for entry in entries if "note" in entry]:
            answer["notes"] = notes[-NOTES:]
        if self.stopped:
            answer["stopped"] = self.stopped
        if state == "lost":
            answer["error"] = InputError(f"the process ended with {self.child.returncode}", kind="lost").fields()
            answer["notes"] = [line for line in lines if _json(line) is None][-NOTES:]
        if state in ("done", "failed"):
            answer |= _result(self.stdout)
        return answer


class Processes:
    """The commands that the clients of a server have asked for.

    Args:
        plugins: Files with rules and tasks, which every command loads.
        db: The database of every command; None for the one of the environment, or ./deltalab.db.
    """

    def __init__(self, plugins: Sequence[Path] = (), db: str | None = None) -> None:
        self._words = [word for file in plugins for word in ("--plugin", str(file))]
        self._environment = {**os.environ, **({"DELTALAB_DB": db} if db else {})}
        self._folder = tempfile.TemporaryDirectory(prefix="deltalab-mcp-")
        self._all: dict[str, Process] = {}

    def start(self, words: Sequence[str], *, seconds: float | None = None) -> Process:
        """Starts a command.

        Args:
            words: The words of the command after `deltalab`.
            seconds: The time after which it is asked to stop; None for as long as it takes.

        Raises:
            InputError: Too many commands run.
        """
        running = [process.name for process in self._all.values() if process.state == "running"]
        if len(running) >= MOST_RUNNING:
            raise InputError(f"{len(running)} tasks run, at most {MOST_RUNNING} do", key=running[0], mend="cancel one")
        name = str(len(self._all) + 1)
        stdout, stderr = Path(self._folder.name, f"{name}.out"), Path(self._folder.name, f"{name}.err")
        with stdout.open("wb") as out, stderr.open("wb") as err:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "deltalab", *self._words, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self._environment,
                start_new_session=True,
            )
        process = self._all[name] = Process(name, tuple(words), child, stdout, stderr, time.monotonic())
        if seconds is not None:
            limit = threading.Timer(seconds, process.stop, [f"it ran {seconds / 60:g} minutes, its limit"])
            limit.daemon = True
            limit.start()
        return process

    def find(self, name: str) -> Process:
        """Returns a process by its name; raises `InputError` if there is none."""
        if name not in self._all:
            raise unknown("task", name, self._all)
        return self._all[name]

    def close(self) -> None:
        """Asks all processes to stop. They end in order, after this process if need be."""
        for process in self._all.values():
            process.stop("the server ended")


def _json(text: str) -> Any:
    """Returns what a line of JSON says; None for another line."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _result(file: Path) -> dict[str, Any]:
    """Returns the result in a command's output: one text of JSON, a line of JSON for each of several, or Markdown."""
    if (size := file.stat().st_size) > MOST_BYTES:
        problem = f"the result has {size:,} bytes, and at most {MOST_BYTES:,} are told: ask for less"
        return {"error": InputError(problem, kind="too_large").fields()}
    text = file.read_text("utf-8", errors="replace").strip()
    if (whole := _json(text)) is not None:
        return {"result": whole}
    lines = [_json(line) for line in text.splitlines()]
    return {"result": text if None in lines else lines}
