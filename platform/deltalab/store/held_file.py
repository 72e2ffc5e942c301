"""Holds the file of an SQLite ledger open, finds out that it was deleted, moved or replaced, and keeps what it held.

SQLite itself does not notice: it goes on in the deleted file, and what it writes is gone with the process.
"""

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from deltalab.errors import InputError
from deltalab.store.database import LOCK_SECONDS, SQLITE_PASSING
from deltalab.store.outage import Outage

Place = tuple[int, int] | None
"""The device and the number of a file; None for a file that is not there."""


class LedgerGone(InputError):
    """The file of the ledger was deleted, moved or replaced while the ledger was open."""

    exit_code = 1


class HeldFile:
    """The file of an open SQLite ledger.

    Attributes:
        path: The file's path when the ledger was opened.
    """

    def __init__(self, path: Path) -> None:
        """Remembers which file the path names."""
        self.path = path.absolute()
        self._connection: sqlite3.Connection | None = None
        self._places: tuple[Place, Place] = (_place(self.path), None)

    def hold(self) -> None:
        """Opens a connection. As long as it is open, what the file and its log hold can be read."""
        if self._connection is None:
            self._connection = sqlite3.connect(self.path, check_same_thread=False)
            self._connection.execute("SELECT count(*) FROM alembic_version").fetchone()  # opens the log, too
            self._places = self._places[0], self._now()[1]

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()

    @property
    def in_place(self) -> bool:
        """Whether the path and the log's path still name the files that are open here."""
        file, log = self._now()
        return file == self._places[0] and self._places[1] in (None, log)

    def _now(self) -> tuple[Place, Place]:
        return _place(self.path), _place(self.path.with_name(self.path.name + "-wal"))

    def reads_back(self, driver_id: str, key: str) -> bool:
        """Returns whether one who opens the path now finds a driver's lease, and a trial.

        Raises:
            Outage: The file cannot be read now, and may be readable later.
        """
        try:
            return self.in_place and _holds(self.path, driver_id, key)
        except sqlite3.Error as error:
            if self.in_place and error.sqlite_errorcode & 0xFF in SQLITE_PASSING:
                raise Outage(f"{self.path}: {error}") from None
            return False

    def keep(self, driver_id: str | None) -> Path:
        """Writes what the file held to a new file beside it, or in the system's temporary folder if that fails.

        Args:
            driver_id: A driver whose lease the file held last; None if it held none.

        Returns:
            The new file, which is a ledger.

        Raises:
            LedgerGone: What the file held cannot be read or written.
        """
        assert self._connection is not None
        reason = ""
        for folder in (self.path.parent, Path(tempfile.gettempdir())):
            number, file = 1, folder / f"{self.path.name}.kept"
            while file.exists():
                number += 1
                file = folder / f"{self.path.name}.kept-{number}"
            try:
                with closing(sqlite3.connect(file)) as copy:
                    self._connection.backup(copy)
                    damage = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
                if damage == "ok" and (driver_id is None or _holds(file, driver_id)):
                    return file
                reason = "it was overwritten"
            except sqlite3.Error as error:
                reason = str(error)
            file.unlink(missing_ok=True)
        raise LedgerGone(f"{self.path}: was deleted, moved or replaced, and what it held cannot be kept: {reason}")


def _place(file: Path) -> Place:
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def _holds(file: Path, driver_id: str, key: str | None = None) -> bool:
    """Returns whether a new connection to a file finds a driver's lease, and a trial unless `key` is None."""
    uri = f"file:{quote(str(file))}?mode=rw"  # does not make a missing file
    with closing(sqlite3.connect(uri, uri=True, timeout=LOCK_SECONDS)) as connection:
        rows = [connection.execute("SELECT 1 FROM driver WHERE id = ?", (driver_id,))]
        if key is not None:
            rows.append(connection.execute("SELECT 1 FROM trial WHERE [key] = ?", (key,)))
        return all(row.fetchone() is not None for row in rows)
