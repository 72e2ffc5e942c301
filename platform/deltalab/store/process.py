"""Tells one process from all others, and whether it still lives, as far as another process can see."""

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

    host: the machine's name, for people. machine: the running system and, on Linux, the space of process ids; where it
    is equal, `pid` means the same process. started: when the process began, in the system's own terms, since a later
    process may get its number.
    """

    host: str
    machine: str
    pid: int
    started: str

    @classmethod
    def here(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(socket.gethostname(), _machine(), pid, _started(pid) or "")

    @property
    def lives(self) -> bool | None:
        """None where this process cannot tell: the other one runs on another machine, in another container, or hidden.

        No clock is asked. A process that was killed and that its parent has not noticed yet counts as gone.
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
    """What changes with each start of the system, and between containers that number processes on their own."""
    if sys.platform == "linux":
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    asked = subprocess.run(["sysctl", "-n", "kern.bootsessionuuid"], capture_output=True, text=True)
    return f"{socket.gethostname()} {asked.stdout.strip()}"


def _started(pid: int) -> str | None:
    """None for a process that may not be looked at; "" for one that has ended and is still listed."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return None
        state, *fields = stat.rpartition(")")[2].split()
        return "" if state in "ZX" else fields[18]
    asked = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True)
    state, _, started = asked.stdout.strip().partition(" ")
    return None if not state else "" if state.startswith("Z") else started.strip()
