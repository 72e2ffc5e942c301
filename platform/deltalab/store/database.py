"""Opens the ledger's database: checks that it is ours and current, and turns its failures into one line."""

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from deltalab.errors import InputError, unknown

PATIENCE_SECONDS = 30  # how long a writer waits for another one
WRITER_LOCK = 0x64656C7461  # the advisory lock that our writers take in PostgreSQL
NO_PERMISSION = {"42501", "25006"}  # PostgreSQL: insufficient privilege, read-only transaction


def address(where: str | Path | None) -> URL:
    """The database URL for a path or a URL; None is ./deltalab.db.

    Raises `InputError` for a URL that cannot be parsed (and does not repeat it: it may hold a password), for a database
    other than SQLite or PostgreSQL, and for SQLite without a file.

    >>> address(None)
    sqlite:///deltalab.db
    >>> address("postgresql://me:secret@host/lab")
    postgresql://me:***@host/lab
    """
    text = "deltalab.db" if where is None else str(where)
    # A URL that went through `Path` has lost a slash. Do not take it for a file, named after a password.
    if not re.match(r"[A-Za-z][\w+]+:/", text):
        url = URL.create("sqlite", database=text)
    else:
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            raise InputError(
                "the database's URL cannot be read; allowed: PATH, sqlite:///PATH, postgresql://USER@HOST/NAME"
            ) from None
        drivers = ["sqlite", "postgresql", "postgresql+psycopg"]
        if url.drivername not in drivers:
            raise unknown("database", url.drivername, drivers)
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InputError("the ledger needs a file: a database in memory is lost with its process")
    return url


def shown(url: URL) -> str:
    """The URL without its password, and without its query, which may hold one too."""
    return url.set(query={}).render_as_string(hide_password=True)


def connect(url: URL, *, migrating: bool = False) -> Engine:
    """An engine that begins each transaction itself, and takes the write lock for those with the option `writes`.

    migrating: for migrations, which need foreign keys off and write-ahead logging on.
    """
    sqlite = url.get_backend_name() == "sqlite"
    try:
        engine = create_engine(
            url,
            connect_args={"timeout" if sqlite else "connect_timeout": PATIENCE_SECONDS},
            pool_pre_ping=True,
            json_serializer=partial(json.dumps, allow_nan=False),  # NaN is not JSON: PostgreSQL refuses it
        )
    except ModuleNotFoundError:
        raise InputError(f"{shown(url)}: needs psycopg; pip install 'deltalab[postgres]'") from None

    def connected(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous=NORMAL")
        # With foreign keys on, a batch migration, which drops and remakes tables, would delete rows that refer to them.
        # Write-ahead logging changes the file, so it is switched on only in a file known to be ours.
        cursor.execute("PRAGMA journal_mode=WAL" if migrating else "PRAGMA foreign_keys=ON")
        cursor.close()

    def begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        if sqlite:
            # The driver's own BEGIN comes too late for DDL. A writer takes the lock first: a transaction that reads and
            # then writes fails at once if another one wrote in between.
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
        elif writes:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{PATIENCE_SECONDS}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")

    if sqlite:
        event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    return engine


@contextmanager
def told(url: URL) -> Iterator[None]:
    """Turns failures caused by the machine or the user into an `InputError`; our own faults pass through."""
    try:
        yield
    except DBAPIError as error:
        ours = isinstance(error, OperationalError) and (
            getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
        )
        theirs = (
            isinstance(error, OperationalError)
            or type(error) is DatabaseError  # SQLite's "file is not a database"
            or getattr(error.orig, "sqlstate", None) in NO_PERMISSION
        )
        if ours or not theirs:
            raise
        reason = " ".join(str(error.orig).split())
        for secret in (url.password, url.query.get("password")):
            if secret:
                reason = reason.replace(str(secret), "***")
        if reason == "unable to open database file":
            folder = Path(url.database or "").absolute().parent
            reason += f": is there a folder {folder}, and may you write there?"
        elif reason == "database is locked":
            reason += f" by another process, for {PATIENCE_SECONDS} s"
        raise InputError(f"{shown(url)}: {reason}") from None


@cache
def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(Path(__file__).parent / "migrations"))


def revision(connection: Connection, url: URL) -> str | None:
    """The revision of a deltalab database; None for an empty one.

    Raises `InputError` for a database that is not deltalab's, or that a newer deltalab wrote.
    """
    tables = inspect(connection).get_table_names()
    if not tables:
        return None
    heads = MigrationContext.configure(connection).get_current_heads()
    if "study" not in tables or len(heads) != 1:
        raise InputError(f"{shown(url)}: is not a deltalab database; give the path of a new one")
    if heads[0] not in {script.revision for script in _scripts().walk_revisions()}:
        raise InputError(f"{shown(url)}: revision '{heads[0]}' is newer than this deltalab knows; upgrade deltalab")
    return heads[0]


def require_file(url: URL) -> None:
    """Raises `InputError` where the URL names a file that does not exist."""
    if url.get_backend_name() == "sqlite" and "uri" not in url.query and not Path(url.database or "").exists():
        raise InputError(f"{shown(url)}: no such database; `platform study run` makes one")


def require_current(engine: Engine, *, create: bool) -> None:
    """Checks that the database is ours and current; with `create`, fills an empty one with tables.

    Raises `InputError` where it is not, and for an empty or missing one without `create`.
    """
    url = engine.url
    if not create:
        require_file(url)
    with told(url):
        with engine.connect() as connection:
            found = revision(connection, url)
        if found is None and create:
            migrate(url)
        elif found is None:
            raise InputError(f"{shown(url)}: is empty; `platform study run` fills one")
        elif found != _scripts().get_current_head():
            raise InputError(f"{shown(url)}: revision '{found}' is old; run `platform db upgrade` first")


def migrate(url: URL) -> None:
    """Brings an empty or older database to this code's revision, all or nothing."""
    with told(url), ExitStack() as stack:
        engine = connect(url)
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            revision(connection, url)  # refuse a foreign file before changing it
        engine = connect(url, migrating=True)
        stack.callback(engine.dispose)
        with engine.execution_options(writes=True).begin() as connection:
            if (
                revision(connection, url) != _scripts().get_current_head()
            ):  # another process may have migrated it meanwhile
                config = Config(attributes={"connection": connection})
                config.set_main_option("script_location", _scripts().dir.replace("%", "%%"))
                command.upgrade(config, "head")
