"""Shows the first lines that a stack prints, and keeps all that stacks print in a file of bounded size."""

import fcntl
import logging
import os
import sys
from pathlib import Path

_log = logging.getLogger("deltalab")

SHOWN_LINES = 5
"""How many lines of a stack are shown."""

SHOWN_BYTES = 2000
"""How many bytes of a stack are shown at most, since a line may have any length."""

LARGEST = 10_000_000
"""The most bytes of the file. The older half is deleted when the file is full."""


class PrintedOutput:
    """What the stacks of a worker print, on both output streams.

    Attributes:
        file: The file that keeps it. Several workers write there.
    """

    def __init__(self, file: Path) -> None:
        """Begins before the first stack. The file is made when something is printed."""
        self.file = file
        self.begin("")

    def begin(self, stack: str) -> None:
        """Begins a stack.

        Args:
            stack: The name that stands in the file above what the stack prints.
        """
        self._stack = stack
        self._lines, self._bytes = SHOWN_LINES, SHOWN_BYTES
        self._lines_left_out = self._bytes_left_out = 0
        self._amid_line = False
        self._wrote_to: int | None = None
        self._failure: OSError | None = None

    def take(self, data: bytes, *, show: bool) -> None:
        """Keeps what the stack printed now.

        Args:
            data: What it printed.
            show: Whether this goes to this process's stderr, too, as long as the stack has shown little.
        """
        self._keep(data)
        if not show:
            return
        lines = data[: self._bytes].splitlines(keepends=True)[: self._lines]
        shown = b"".join(lines)
        sys.stderr.write(shown.decode(errors="replace"))
        self._lines -= sum(line.endswith((b"\n", b"\r")) for line in lines)
        self._bytes -= len(shown)
        if shown:
            self._amid_line = not shown.endswith(b"\n")
        if left_out := data[len(shown) :]:
            if self._amid_line:
                sys.stderr.write("\n")
            self._bytes, self._amid_line = 0, False
            self._bytes_left_out += len(left_out)
            self._lines_left_out += left_out.count(b"\n")

    def end(self) -> None:
        """Says how much the stack printed beside what was shown, and where it is."""
        if self._bytes_left_out:
            where = f"{self.file} keeps the newest {LARGEST / 1e6:.0f} MB"
            if self._failure is not None:
                where = f"{self.file} does not have all of it: {self._failure.strerror}"
            size = f"{self._bytes_left_out / 1e6:,.1f} MB" if self._bytes_left_out >= 1e5 else "less than 0.1 MB"
            lines = f"{self._lines_left_out:,} more line{'s' * (self._lines_left_out != 1)}"
            _log.warning(f"{self._stack}: printed {lines}, {size}; {where}")

    def _keep(self, data: bytes) -> None:
        """Adds data to the file, with the stack's name above it unless this stack was the last that wrote there."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END)
                if size != self._wrote_to:
                    data = f"--- {self._stack}\n".encode() + data
                if size + len(data) > LARGEST:
                    file.seek(max(0, size - LARGEST // 2))
                    newest = file.read()
                    file.truncate(0)
                    file.write(newest)
                file.write(data)
                file.flush()
                self._wrote_to = file.tell()
        except OSError as failure:  # A full disk is no fault of the stack, whose training goes on.
            self._failure = failure
