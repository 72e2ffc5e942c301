"""Opens the ledger's database, checks that it is deltalab's and current, and turns its failures into one line."""

import json
import os
import re
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.engine.interfaces import DBAPIConnection, DBAPICursor
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry

from deltalab.errors import InputError, NotInstalled, unknown
from deltalab.store.models import Base
from deltalab.store.outage import Outage

LOCK_SECONDS = 30
"""How long a writer waits for another one."""
STOPPED_SECONDS = 60
"""How long a writer in PostgreSQL may hold the lock without a statement."""
WRITER_LOCK = 0x64656C7461
"""The advisory lock that our writers take in PostgreSQL."""
KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3, "tcp_user_timeout": 60_000}
"""Options, in s, s, a number and ms, by which PostgreSQL's client finds within a minute that the server is gone."""

MISTYPED = re.compile(r":.*@|@.*:|\b(password|passwd|pwd)\s*=|^\W*(postgres|sqlite)[\w+]*\s*:", re.DOTALL)
"""A path that is a mistyped URL or a connection string, and may hold a password."""
SECRETS = ("password", "sslpassword")
ANY_WRITES = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH
"""The bits of a file's mode that let anybody write it."""
RESTORE = "restore a copy, or save what can be read with `sqlite3 FILE .recover`"
"""What helps against a damaged file."""

# PostgreSQL's SQLSTATE, or its first digits.
NO_PERMISSION = {"42501", "25006"}  # insufficient privilege, read-only transaction
PASSING = (
    "08",  # the connection failed
    "40001", "40P01", "55P03",  # a conflict with another transaction, a deadlock, a lock that was not had in time
    "53",  # no memory, no disk, too many connections
    "25P03",  # the server ended our transaction: this process had been stopped amid it
    "57P01", "57P02", "57P03", "57P05",  # the server stops, crashed, starts, or closed an idle connection
    "58",  # I/O
)  # fmt: skip
SQLITE_PASSING = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,
}


def address(where: str | Path | None) -> URL:
    """Returns the database URL for a path or a URL; None is ./deltalab.db.

    Raises:
        InputError: The URL cannot be parsed (the message does not repeat it, since it may hold a password), the
            database is neither SQLite nor PostgreSQL, or SQLite has no file.

    Examples:
        >>> address(None)
        sqlite:///deltalab.db
        >>> address("postgresql://me:secret@host/lab")
        postgresql://me:***@host/lab
    """
    text = "deltalab.db" if where is None else str(where).strip()
    unreadable = InputError(
        "the database's URL cannot be read; allowed: PATH, sqlite:///PATH, postgresql://USER@HOST/NAME; "
        "a password's @ is written %40"
    )
    # A URL that went through `Path` has lost a slash. It must not become a file that is named after a password.
    if not re.match(r"[A-Za-z][\w+]+:/", text):
        if MISTYPED.search(text):
            raise unreadable
        url = URL.create("sqlite", database=text)
    else:
        try:
            url = make_url(text)
        except (ArgumentError, ValueError):
            raise unreadable from None
        drivers = ["sqlite", "postgresql", "postgresql+psycopg"]
        if url.drivername not in drivers:
            raise unknown("database", url.drivername, drivers)
        # A password that holds @, = or & may end up in another part of the URL.
        if url.get_backend_name() == "postgresql" and re.search("[@=&]", f"{url.username}{url.host}{url.database}"):
            raise unreadable
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise InputError("the ledger needs a file: a database in memory is lost with its process")
    return url


def display_url(url: URL) -> str:
    """Returns the URL without its password, and without its query, which may hold a password, too."""
    return url.set(query={}).render_as_string(hide_password=True)


def without_password(text: str) -> str:
    """Returns a word of a command without the passwords of the URLs in it.

    Examples:
        >>> without_password("--db=postgresql://me:secret@host/lab?password=secret")
        '--db=postgresql://me:***@host/lab?password=***'
    """
    text = re.sub(r"(password\s*=\s*)[^&\s]+", r"\1***", text)
    return re.sub(r"(://[^/@\s]*?:)\S+(?=@)", r"\1***", text)


def connect(url: URL, *, migrating: bool = False) -> Engine:
    """Returns an engine that begins each transaction itself, and takes the write lock for the option `writes`.

    Args:
        url: The address of the database.
        migrating: Whether the engine is for migrations, which need foreign keys off and write-ahead logging on.
    """
    sqlite = url.get_backend_name() == "sqlite"
    options = {"timeout": LOCK_SECONDS} if sqlite else {"connect_timeout": LOCK_SECONDS, **KEEPALIVE}
    try:
        engine = create_engine(
            url,
            connect_args={name: value for name, value in options.items() if name not in url.query},
            pool_pre_ping=True,
            json_serializer=partial(json.dumps, allow_nan=False),  # NaN is not JSON, and PostgreSQL refuses it
            **({"creator": partial(_open_unchanging, url)} if sqlite and _is_unchanging(url) else {}),
        )
    except ModuleNotFoundError:
        raise NotInstalled("needs psycopg", "'deltalab[postgres]'", where=display_url(url)) from None

    def on_connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        cursor.execute("PRAGMA synchronous=NORMAL")
        # A batch migration drops and remakes tables. With foreign keys on, it would delete the rows that refer to them.
        # Write-ahead logging changes the file, so it is switched on only in a file known to be ours.
        if migrating:
            _log_ahead(cursor)
        else:
            cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    def on_begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        if options.get("isolation_level") == "AUTOCOMMIT":
            return
        writes = options.get("writes", False)
        if sqlite:
            # The driver's own BEGIN comes too late for DDL. A writer takes the lock first, since a transaction that
            # reads and then writes fails at once if another transaction wrote in between.
            connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
        elif writes:
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_SECONDS}s'")
            # Otherwise a driver that is stopped amid a write would keep all others from writing.
            connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{STOPPED_SECONDS}s'")
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")

    if sqlite:
        event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
    return engine


def _is_unchanging(url: URL) -> bool:
    """Returns whether nobody may write an SQLite file, or this process neither it nor its folder.

    Nothing may be in a log beside it.
    """
    file = Path(str(url.database))
    if "uri" in url.query or not file.is_file():
        return False
    if file.stat().st_mode & ANY_WRITES and (os.access(file, os.W_OK) or os.access(file.parent, os.W_OK)):
        return False
    log = file.with_name(f"{file.name}-wal")
    return not log.exists() or log.stat().st_size == 0


def may_attach(url: URL) -> bool:
    """Returns whether another SQLite ledger's connection can read the database by its path alone."""
    return url.get_backend_name() == "sqlite" and "uri" not in url.query and not _is_unchanging(url)


def _open_unchanging(url: URL) -> sqlite3.Connection:
    """Opens a file that nobody can change: SQLite would else make files beside it, for locks and its log."""
    uri = f"file:{quote(str(Path(str(url.database)).absolute()))}?immutable=1"
    return sqlite3.connect(uri, uri=True, check_same_thread=False)


def _log_ahead(cursor: DBAPICursor) -> None:
    """Switches write-ahead logging on, and waits for locks, since SQLite does not wait here whatever its timeout."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.02)


@contextmanager
def input_errors(url: URL) -> Iterator[None]:
    """Turns failures caused by the machine or the user into an `InputError`. Faults of deltalab pass through.

    Raises:
        Outage: A failure that may pass.
        InputError: Any other failure caused by the machine or the user.
    """
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        # What SQLAlchemy raises for a text that is no UTF-8, no JSON or no time, as our code wrote none.
        damaged = isinstance(error, UnicodeDecodeError | json.JSONDecodeError) or "isoformat" in str(error)
        if not damaged:
            raise
        raise InputError(f"{display_url(url)}: is damaged: {' '.join(str(error).split())}; {RESTORE}") from None
    except DBAPIError as error:
        sqlite = url.get_backend_name() == "sqlite"
        code, state = getattr(error.orig, "sqlite_errorcode", None), getattr(error.orig, "sqlstate", None)
        is_our_fault = (
            isinstance(error, OperationalError)
            and code == sqlite3.SQLITE_ERROR
            and "malformed" not in str(error.orig)  # a text of the file's schema
        )
        is_outside_fault = (
            isinstance(error, OperationalError)
            or type(error) is DatabaseError  # SQLite's "file is not a database" and "malformed"
            or error.connection_invalidated
            or state in NO_PERMISSION
            or (state or "").startswith(PASSING)
        )
        if is_our_fault or not is_outside_fault:
            raise
        reason = " ".join(str(error.orig).split())
        for secret in (url.password, *(value for name in SECRETS for value in url.normalized_query.get(name, ()))):
            if secret:
                reason = reason.replace(str(secret), "***")
        if reason == "unable to open database file":
            file = Path(url.database or "").absolute()
            reason += (
                ": it is a folder" if file.is_dir() else f": is there a folder {file.parent}, and may you write there?"
            )
        elif reason == "file is not a database" and (url.database or "").endswith(".xz"):
            reason += ": unpack it first, by `xz -dc FILE.xz > FILE`"
        elif reason == "database is locked":
            reason += f" by another process, for {LOCK_SECONDS} s"
        elif reason == "database disk image is malformed":
            reason += f": {RESTORE}"
        if sqlite:
            may_pass = code is not None and code & 0xFF in SQLITE_PASSING
        else:
            # A server that cannot be reached has no SQLSTATE.
            may_pass = error.connection_invalidated or (state.startswith(PASSING) if state else True)
        raise (Outage if may_pass else InputError)(f"{display_url(url)}: {reason}") from None


MIGRATIONS = Path(__file__).parent / "migrations"


def revisions() -> list[str]:
    """Returns the revisions from the first to the latest. The file name of each migration begins with its revision."""
    return sorted(file.stem.partition("_")[0] for file in (MIGRATIONS / "versions").glob("[0-9]*.py"))


Schema = dict[str, set[str]]
"""The columns of each table."""


def revision(connection: Connection, url: URL) -> str | None:
    """Returns the revision of a deltalab database, or None for an empty database.

    Raises:
        InputError: The database is not deltalab's although a revision may have one of our names, its migration was cut
            short, or a newer deltalab wrote it.
    """
    foreign = InputError(f"{display_url(url)}: is not a deltalab database; give the path of a new one")
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    schema = _schema(connection, {"alembic_version", *Base.metadata.tables} & tables)
    if schema.get("alembic_version") != {"version_num"}:
        raise foreign
    heads = connection.scalars(text("SELECT version_num FROM alembic_version")).all()
    if len(heads) != 1 or not {"study", "arm", "trial", "run", "metric"} <= tables:
        raise foreign
    if heads[0] not in revisions():
        raise InputError(
            f"{display_url(url)}: revision '{heads[0]}' is newer than this deltalab knows; upgrade deltalab"
        )
    wanted, later = _models(), Schema()
    if heads[0] != (latest := revisions()[-1]):
        wanted, later = _migrated(heads[0]), _migrated(latest)
    for table in {**later, **wanted}:
        missing = wanted.get(table, set()) - schema.get(table, set())
        ahead = (later.get(table, set()) - wanted.get(table, set())) & schema.get(table, set())
        if missing or ahead:
            names = ", ".join(sorted(missing or ahead))
            raise InputError(
                f"{display_url(url)}: is not a deltalab database of the revision '{heads[0]}' that it states, "
                f"or damaged: table {table} has {'no ' if missing else ''}{names}; "
                "restore a copy, or give the path of a new one"
            )
    return str(heads[0])


def _schema(connection: Connection, tables: Iterable[str]) -> Schema:
    """Returns the columns of tables of a database."""
    columns_of = inspect(connection).get_multi_columns(filter_names=list(tables))
    return {table: {column["name"] for column in columns} for (_, table), columns in columns_of.items()}


def _models() -> Schema:
    """Returns the columns of tables as this code declares them."""
    return {name: set(table.columns.keys()) for name, table in Base.metadata.tables.items()}


def _migrated(to: str) -> Schema:
    """Returns the tables that the migrations up to a revision make."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        _upgrade(connection, to)
        tables = set(inspect(connection).get_table_names()) - {"alembic_version"}
        return _schema(connection, tables)


def _upgrade(connection: Connection, to: str) -> None:
    """Runs the migrations up to a revision."""
    # Import here: this takes longer than reading a ledger, which seldom needs it.
    from alembic import command
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    command.upgrade(config, to)


def require_file(url: URL) -> None:
    """Raises `InputError` if the URL names a file that does not exist."""
    if url.get_backend_name() == "sqlite" and "uri" not in url.query and not Path(url.database or "").exists():
        raise InputError("no such database", where=display_url(url), mend="deltalab study run makes one")


def require_current(engine: Engine, *, create: bool) -> None:
    """Checks that the database is deltalab's and current; with `create`, fills an empty one with tables.

    Raises:
        InputError: The database is not deltalab's or not current, or it is empty or missing and `create` is false.
    """
    url = engine.url
    if not create:
        require_file(url)
    with input_errors(url):
        with engine.connect() as connection:
            current = revision(connection, url)
        if current is None and create:
            migrate(url)
        elif current is None:
            raise InputError(f"{display_url(url)}: is empty; `deltalab study run` fills one")
        elif current != revisions()[-1]:
            raise InputError(f"{display_url(url)}: revision '{current}' is old; run `deltalab db upgrade` first")


def migrate(url: URL) -> None:
    """Brings an empty or older database to this code's revision, all or nothing."""
    with input_errors(url), ExitStack() as stack:
        engine = connect(url)
        stack.callback(engine.dispose)
        with engine.connect() as connection:
            revision(connection, url)  # refuse a foreign file before changing it
        engine = connect(url, migrating=True)
        stack.callback(engine.dispose)
        with engine.execution_options(writes=True).begin() as connection:
            # Another process may have migrated it meanwhile.
            if revision(connection, url) != revisions()[-1]:
                _upgrade(connection, "head")
