"""A database that fails at a chosen call of its driver: a statement, or a commit before or after it took effect."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from deltalab.store import Store

When = Literal["statement", "before the commit", "after the commit"]


@contextmanager
def failing(store: Store, when: When, at: int) -> Iterator[list[str]]:
    """Makes the store's driver fail once, at the call of that kind with this number, from 0. Yields what failed.

    The transaction of a failed statement is lost. A commit that fails "after" has taken effect: the answer was lost.
    """
    dialect = store._engine.dialect
    counted, failed = 0, list[str]()

    def due() -> bool:
        nonlocal counted
        counted += 1
        return counted == at + 1

    def fail(what: str) -> None:
        failed.append(what)
        raise _lost(dialect.name)

    def execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        if when == "statement" and due():
            fail(statement)
        type(dialect).do_execute(dialect, cursor, statement, parameters, context)

    def commit(connection: Any) -> None:
        now = when != "statement" and due()
        if now and when == "before the commit":
            connection.rollback()
            fail(when)
        type(dialect).do_commit(dialect, connection)
        if now:
            fail(when)

    dialect.do_execute, dialect.do_commit = execute, commit  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        del dialect.do_execute, dialect.do_commit


def _lost(backend: str) -> Exception:
    """What the driver raises where the disk or the server is gone."""
    if backend == "sqlite":
        error = sqlite3.OperationalError("disk I/O error (injected)")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        return error
    import psycopg

    return psycopg.OperationalError("server closed the connection unexpectedly (injected)")
