"""Backs up a ledger while studies write it, by the database's own means.

These are SQLite's online backup and PostgreSQL's pg_dump. A backup is one state of the ledger. It takes its file's name
once it is whole.
"""

import logging
import os
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import URL, Engine

from deltalab.errors import InputError
from deltalab.store.database import RESTORE, SECRETS, display_url, input_errors
from deltalab.store.ledger import Store

_log = logging.getLogger("deltalab")

SAY_SECONDS = 5.0
PAGES_AT_ONCE = 10_000
"""The pages of an SQLite file that are copied between two reports."""

LOST_BY_REPLACING = "SELECT count(*) FROM old.trial WHERE state = 'done' AND [key] NOT IN (SELECT [key] FROM trial)"

Say = Callable[[str], None]


def back_up(store: Store, file: Path, say: Say) -> None:
    """Backs up a ledger to a new file. If this fails, no file is left.

    Args:
        store: The ledger.
        file: The new file: for SQLite a ledger itself, for PostgreSQL an archive that `pg_restore` reads.
        say: Is called with a line about the progress now and then.

    Raises:
        InputError: The file exists or cannot be written, the ledger cannot be read, or PostgreSQL's pg_dump is missing
            or refuses.
    """
    if file.exists():
        raise InputError(f"{file}: exists; give the path of a new file")
    unfinished = _unfinished(file)
    try:
        _write(store, unfinished, say)
        unfinished.replace(file)
    except OSError as error:
        raise InputError(f"{file}: cannot be written: {error.strerror}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _unfinished(file: Path) -> Path:
    """Returns where this process writes a backup before it is whole. Removes what killed processes left there."""
    for left in file.parent.glob(f".{file.name}.*.partial"):
        number = left.name.split(".")[-2]
        if number.isdecimal() and not Path(f"/proc/{number}").exists():
            left.unlink(missing_ok=True)
    return file.with_name(f".{file.name}.{os.getpid()}.partial")


def _write(store: Store, file: Path, say: Say) -> None:
    """Writes a backup to a file that does not exist."""
    store.require_in_place()
    if store._engine.name == "sqlite":
        _copy_pages(store._engine, file, say)
    else:
        _dump(store._engine.url, file, say)


def _copy_pages(engine: Engine, file: Path, say: Say) -> None:
    """Copies an SQLite file page by page, and checks the copy."""
    said_at = time.monotonic()

    def tell(_: int, remaining: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > SAY_SECONDS:
            said_at = time.monotonic()
            say(f"{total - remaining:,} of {total:,} pages")

    try:
        with (
            input_errors(engine.url),
            engine.connect() as connection,
            closing(sqlite3.connect(file)) as copy,
        ):
            # One transaction sees one state. Without it, each write of a driver would let the copy begin anew.
            connection.exec_driver_sql("SELECT count(*) FROM alembic_version").scalar()
            ledger = connection.connection.driver_connection
            assert isinstance(ledger, sqlite3.Connection)
            ledger.backup(copy, pages=PAGES_AT_ONCE, progress=tell)
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
            problem = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
    except sqlite3.Error as error:
        raise InputError(f"{display_url(engine.url)}: cannot be backed up to {file.parent}: {error}") from None
    if problem != "ok":
        raise InputError(f"{display_url(engine.url)}: is damaged, and so is its copy: {problem}; {RESTORE}")


def _dump(url: URL, file: Path, say: Say) -> None:
    """Lets pg_dump write an archive."""
    program = shutil.which("pg_dump")
    if program is None:
        raise InputError(
            "a backup of PostgreSQL needs pg_dump, of PostgreSQL's client programs; without it, "
            "`deltalab db export FILE` copies the ledger to an SQLite file"
        )
    if "sslpassword" in url.query:
        raise InputError("pg_dump takes no sslpassword but in its arguments, which `ps` shows: use a key without one")
    password = url.password or url.normalized_query.get("password", (None,))[0]
    address = url.set(drivername="postgresql").difference_update_query(SECRETS)._replace(password=None)
    command = [program, "--format=custom", "--no-password", "--verbose", f"--file={file}"]
    process = subprocess.Popen(
        [*command, f"--dbname={address.render_as_string(hide_password=False)}"],
        env={**os.environ, **({"PGPASSWORD": str(password)} if password else {})},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    said_at, errors = time.monotonic(), list[str]()
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if errors or "error:" in line:
                errors.append(line)  # Its details follow.
            elif time.monotonic() - said_at > SAY_SECONDS:
                said_at = time.monotonic()
                say(line.strip())
    if process.returncode:
        reason = " ".join(" ".join(errors).split()) or f"pg_dump ended with exit code {process.returncode}"
        raise InputError(f"{display_url(url)}: {reason}")


class Backups:
    """Backs up a ledger again and again, from a thread, and once more when the block is done.

    The file is `NAME.backup` in the ledger's folder. A newer backup replaces an older one that has no finished trial
    beside its own; another one is kept, and the newer one is called `NAME.backup-2`, and so on. PostgreSQL's archives
    replace one another.
    """

    def __init__(self, store: Store, seconds: float | None) -> None:
        """Begins before the first backup.

        Args:
            store: The ledger.
            seconds: The time between two backups in seconds; None for no backups at all.
        """
        self._store, self._seconds, self._stop = store, seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="backups", daemon=True)
        self._failed = False

    def __enter__(self) -> Self:
        if self._seconds is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._seconds is not None:
            self._stop.set()
            self._thread.join()
            if kind is None:  # Whoever tells the study to stop does not wait for another backup.
                self._back_up()

    def _run(self) -> None:
        while not self._stop.wait(self._seconds):
            self._back_up()

    def _back_up(self) -> None:
        """Makes a backup. Says so if it fails, since the study goes on, and once more when backups succeed again."""
        name = Path(str(self._store._engine.url.database)).name
        file = self._store.folder / f"{name}.backup"
        unfinished = _unfinished(file)
        try:
            _write(self._store, unfinished, lambda _: None)
            file = _replaceable(file, unfinished)
            unfinished.replace(file)
        except (InputError, OSError, sqlite3.Error) as error:
            if not self._failed:
                _log.warning(f"no backup of the ledger: {error}")
            self._failed = True
        else:
            if self._failed:
                _log.warning(f"the ledger is backed up again, to {file}")
            self._failed = False
        finally:
            unfinished.unlink(missing_ok=True)


def _replaceable(file: Path, newer: Path) -> Path:
    """Returns the first of FILE, FILE-2, FILE-3 ... that a newer backup may replace without the loss of a trial."""
    number, candidate = 1, file
    while candidate.exists() and not _has_all_of(newer, candidate):
        number += 1
        candidate = file.with_name(f"{file.name}-{number}")
    return candidate


def _has_all_of(newer: Path, older: Path) -> bool:
    """Returns whether a backup has every finished trial of an older one; True for archives of PostgreSQL."""
    with newer.open("rb") as head:
        if head.read(6) != b"SQLite":
            return True
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("ATTACH ? AS old", (str(older),))
        return bool(connection.execute(LOST_BY_REPLACING).fetchone()[0] == 0)
