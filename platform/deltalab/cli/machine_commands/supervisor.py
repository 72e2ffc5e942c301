"""Runs the user's command in a process of its own, which starts again when it dies."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from deltalab import progress
from deltalab.errors import InputError

MOST_DEATHS = 5
"""A process that dies more often than this within `WITHIN` seconds is given up."""

WITHIN = 3600.0

PAUSES = (1.0, 5.0, 25.0)
"""Seconds before the process starts again, after its first, second and later deaths."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the supervisor passes on to the process."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); sys.argv[:] = sys.argv[2:]; "
    "from deltalab.cli.app import main; main()"
)


class GivenUp(InputError):
    """The process died too often."""

    exit_code = 1


class _Supervisor:
    """The process, and the last signal that it was sent."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.signal: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        self.signal = number
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def run(self) -> int:
        """Runs the process to its end. Returns its exit code, or minus the signal that ended it."""
        # Safe mode: a file of the working folder is no module. A group of its own: Ctrl-C comes from here alone.
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), sys.argv[0], *self.words]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        if self.signal is not None:  # It came before there was a process.
            self._process.send_signal(self.signal)
        return self._process.wait()

    def pause(self, seconds: float) -> None:
        """Waits, unless a signal comes."""
        until = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < until:
            time.sleep(0.1)


def supervise(words: Sequence[str]) -> int:
    """Runs a command until it ends by itself: a process that a signal ends, such as SIGKILL, starts again.

    A process that ends after a signal to the supervisor does not start again.

    Args:
        words: The words of the command, without the program.

    Returns:
        The exit code of the command.

    Raises:
        GivenUp: The process died too often.
    """
    supervisor = _Supervisor(words)
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    deaths: list[float] = []
    try:
        for number, handler in before.items():
            if handler != signal.SIG_IGN:  # as under nohup
                signal.signal(number, supervisor.pass_on)
        while True:
            code = supervisor.run()
            if code >= 0:
                return code
            if supervisor.signal is not None:
                return 128 - code
            now, name = time.monotonic(), signal.Signals(-code).name
            deaths = [death for death in deaths if now - death < WITHIN] + [now]
            if len(deaths) > MOST_DEATHS:
                raise GivenUp(f"the driver died {len(deaths)} times within an hour, at last by {name}", kind="lost")
            seconds = PAUSES[min(len(deaths), len(PAUSES)) - 1]
            progress.note(
                f"the driver was ended by {name}; it starts again in {seconds:g} s, "
                f"for the {len(deaths)}. of at most {MOST_DEATHS} times within an hour"
            )
            supervisor.pause(seconds)
            if supervisor.signal is not None:
                return 128 + supervisor.signal
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
