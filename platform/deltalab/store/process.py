"""Identifies a process among those of all machines, and tells whether it still lives, if this process can see that."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class Process:
    """A process of some machine.

    Attributes:
        host: The machine's name, for people.
        machine: A text that identifies the running system and, on Linux, its namespace of process ids. Among processes
            with an equal `machine`, `pid` is unique.
        started: When the process began, in the notation of the operating system. A later process may get the same
            `pid`, but it has another `started`.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Self:
        """Returns this process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _started(pid) or "")

    @property
    def lives(self) -> bool | None:
        """Whether the process lives, or None if this process cannot tell.

        This process cannot tell if the other process runs on another machine or in another container, or is hidden. The
        answer depends on no clock. A process that was killed counts as gone even if its parent has not noticed yet.
        """
        if self.machine != _machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        started = _started(self.pid)
        if started is None:
            return None
        return started == self.started


@cache
def _machine() -> str:
    """Returns a text that identifies the running system.

    It changes at each start of the system, and differs between containers with their own process ids.
    """
    if sys.platform == "linux":
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    process = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True)
    return f"{socket.gethostname()} {process.stdout.strip()}"


def _started(pid: int) -> str | None:
    """Returns when a process began, in the notation of the operating system.

    Returns None for a process that may not be looked at, and "" for one that has ended and is still listed.
    """
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        state, *fields = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    process = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, started = process.stdout.strip().partition(" ")
    return None if not state else "" if state.startswith("Z") else started.strip()
