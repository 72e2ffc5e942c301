"""Ends a process of a training when the command that launched the training is gone.

The command ends its engine itself, unless it is killed by a signal that nothing can catch. A process that went on
alone would hold the run's lock and its GPU.
"""

import os
import threading
import time
from pathlib import Path

VARIABLE = "DELTALAB_LAUNCHER"
"""The environment variable with the command's process id and start time, as `identity` writes them."""
LOOKS = 1.0
"""Seconds between two looks at the command."""


def identity(pid: int) -> str | None:
    """Returns a process's id and start time, which together are never used again; None if the process has ended."""
    try:
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except OSError:
        return None
    return None if state in "ZX" else f"{pid} {rest[18]}"


def end_with_launcher() -> None:
    """Watches, in a thread, the command that launched the training and this process's parent, and ends with either.

    Without the variable, or where the system has no /proc, nothing is watched: a user may start the engine by hand.
    """
    launcher, parent = os.environ.get(VARIABLE), os.getppid()
    if not launcher or identity(os.getpid()) is None:
        return

    def watch() -> None:
        while identity(int(launcher.split()[0])) == launcher and os.getppid() == parent:
            time.sleep(LOOKS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
