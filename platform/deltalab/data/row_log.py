"""Keeps what a packing has read of a stream, so that it need not read those rows again after a kill."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltalab.data.shard_writer import Shards, write_json

STATE = "reading.json"
ROWS = "reading.bin"
"""`ROWS` has an entry for each document that was taken. `STATE` says how many of them count, and where the stream was
after the last of them. Both are names of files in the folder of a packing that has not ended."""

ENTRY = np.dtype([("source", "<u4"), ("digest", "V32"), ("bytes", "<u8"), ("tokens", "<u8"), ("is_utf8", "?")])

BLOCK = 2**16
"""The entries that are read at a time."""


class RowLog:
    """The documents that a packing has taken, in order.

    A document is a digest here, as the keys of duplicates and the chains of shards want it. Its tokens lie in the
    shards, of which the last of each split need not be whole.

    Args:
        out: The folder of the packing.

    Attributes:
        source: The number of the source that was a stream when the log was last kept; None if it never was.
        row: The number of rows of this stream that had been read.
        state: The state of its data set.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._new = out, list[tuple[int, bytes, int, int, bool]]()
        self.source: int | None = None
        self.row, self.state = 0, dict[str, Any]()
        self._kept = self._written = 0
        if (out / STATE).is_file() and (out / ROWS).is_file():
            kept = json.loads((out / STATE).read_text(encoding="utf-8"))
            self.source, self.row, self.state = kept["source"], kept["row"], kept["state"]
            self._kept = self._written = kept["rows"]

    def rows(self) -> Iterator[NDArray[Any]]:
        """Yields the entries up to there, in blocks."""
        for begin in range(0, self._kept, BLOCK):
            count = min(BLOCK, self._kept - begin)
            yield np.fromfile(self._out / ROWS, ENTRY, count, offset=begin * ENTRY.itemsize)

    def add(self, source: int, digest: bytes, size: int, tokens: int, is_utf8: bool) -> None:
        """Notes a document.

        Args:
            source: The number of its source.
            digest: The SHA-256 of its text.
            size: The bytes of its text.
            tokens: Its tokens in a shard that is not whole; 0 if it is in none.
            is_utf8: Whether its text is UTF-8.
        """
        self._new.append((source, digest, size, tokens, is_utf8))

    def write(self) -> None:
        """Writes the noted documents, which do not count before `keep`."""
        with (self._out / ROWS).open("ab") as file:
            if self._written == self._kept:
                file.truncate(self._kept * ENTRY.itemsize)  # a kill may have left more than counts
            file.write(np.array(self._new, ENTRY).tobytes())
        self._written += len(self._new)
        self._new.clear()

    def keep(self, source: int, row: int, state: dict[str, Any], shards: Mapping[str, Shards]) -> None:
        """Puts everything so far on the disk, of shards that are not whole, too, so that it counts.

        Args:
            source: The number of the source, a stream.
            row: The number of its rows that have been read.
            state: The state of its data set after them.
            shards: The shards of each split.
        """
        for split in shards.values():
            split.sync()
        self.write()
        with (self._out / ROWS).open("rb") as file:
            os.fsync(file.fileno())
        self._kept = self._written
        write_json(self._out / STATE, {"source": source, "row": row, "state": state, "rows": self._kept})


def remove(out: Path) -> None:
    """Removes the files of a log."""
    for name in (STATE, ROWS):
        (out / name).unlink(missing_ok=True)
