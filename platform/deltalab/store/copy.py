"""Copies a ledger between databases, whole or not at all, and compacts one."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Connection,
    Double,
    ForeignKey,
    Integer,
    Row,
    String,
    Table,
    UniqueConstraint,
    delete,
    func,
    select,
    text,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError

from deltalab.errors import InputError
from deltalab.store import database
from deltalab.store.ledger import Store
from deltalab.store.models import TRANSIENT, ArmTrial, Base, RuleVersion, Study, Trial

ROWS_AT_ONCE = 5000
KEYS_AT_ONCE = 300  # databases limit how many values a statement may have
SAY_SECONDS = 5.0
PLAIN = {Integer: "integer", String: "text", Double: "double precision"}
"""The types of SQL whose values go from one driver to another as they are, as PostgreSQL calls them."""

Say = Callable[[str], None]
Values = dict[str, Any]


def export_ledger(store: Store, file: str | Path, say: Say) -> dict[str, int]:
    """Writes the whole ledger to a new SQLite file, itself a ledger, and returns its rows by table.

    say: takes a line about the progress now and then.
    Raises `InputError` where the file exists or cannot be written; nothing is left of it then.
    """
    url = database.address(file)
    if url.get_backend_name() != "sqlite":
        raise InputError("export writes a file; `platform db import FILE --db URL` fills another database with it")
    whole = Path(str(url.database))
    if whole.exists():
        raise InputError(f"{whole}: exists; give the path of a new file")
    unfinished = whole.with_name(f".{whole.name}.partial")
    files = [unfinished.with_name(unfinished.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
    _remove(files)  # a killed export left them
    try:
        with Store.open(unfinished) as made:
            found = import_ledger(made, store, say)
            with _writing(made, isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        unfinished.replace(whole)
    finally:
        _remove(files)
    return found


def _remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def import_ledger(store: Store, source: Store, say: Say) -> dict[str, int]:
    """Adds all of a ledger to another in one transaction, and returns the rows that are new by table.

    A study with the same identity, a trial with the same key, a rule with the same source, and so on, are the same in
    both; what the ledger has of them stays as it is. An empty ledger takes over the ids; in others, ids grow by what
    the largest was. Other writers wait meanwhile.
    Raises `InputError` where a database cannot be read or written; the ledger is then as it was.
    """
    with _reading(source) as read, _writing(store, writes=True) as write:
        copy = _Copy(read, write, say)
        new = {table.name: copy.table(table) for table in Base.metadata.sorted_tables if table.name not in TRANSIENT}
        if write.dialect.name == "postgresql":  # until its autovacuum comes by, it would plan for the ledger of before
            write.exec_driver_sql(f"ANALYZE {', '.join(new)}")
        return new


def vacuum(store: Store) -> dict[str, int]:
    """Removes for good what nobody can see: studies that were deleted, trials of no arm and rules of no trial. Gives
    free space back, and returns the removed rows by table.

    Raises `InputError` where other processes use the database all the time, and where the disk has no room for the copy
    that this takes.
    """
    with _writing(store, writes=True) as connection:
        gone = Study.deleted_at.is_not(None)
        unheld = Trial.id.not_in(select(ArmTrial.trial_id))
        unused = RuleVersion.id.not_in(select(Trial.rule_version_id))
        deleted = {
            table.__tablename__: connection.execute(delete(table).where(chosen)).rowcount
            for table, chosen in ((Study, gone), (Trial, unheld), (RuleVersion, unused))
        }
    with _writing(store, isolation_level="AUTOCOMMIT") as connection:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql("VACUUM")
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            connection.exec_driver_sql(f"SET lock_timeout = '{database.LOCK_SECONDS}s'")
            connection.exec_driver_sql(f"VACUUM (FULL, ANALYZE) {', '.join(Base.metadata.tables)}")
    return deleted


def size(store: Store) -> int:
    """The bytes of the database."""
    query = "SELECT pg_database_size(current_database())"
    if store._engine.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    with store._reading() as session:
        return int(session.scalar(text(query)) or 0)


@contextmanager
def _reading(store: Store) -> Iterator[Connection]:
    """One snapshot of the whole ledger, however long it is read."""
    engine = store._engine
    if engine.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with database.told(engine.url), engine.connect() as connection:
        yield connection


@contextmanager
def _writing(store: Store, **options: Any) -> Iterator[Connection]:
    with database.told(store._engine.url), store._engine.execution_options(**options).begin() as connection:
        yield connection


class _Copy:
    """Copies tables, each after those that it refers to.

    _ids: table -> a row's id in the source -> its id here. _new: table -> the ids here of rows that came with the copy.
    """

    def __init__(self, read: Connection, write: Connection, say: Say) -> None:
        self._read, self._write, self._say = read, write, say
        self._ids: dict[str, dict[int, int]] = {}
        self._new: dict[str, set[int]] = {}

    def table(self, table: Table) -> int:
        """Copies a table's rows, and returns how many are new."""
        before, total = (at.scalar(select(func.count()).select_from(table)) or 0 for at in (self._write, self._read))
        after, done, said = 0, 0, time.monotonic()
        if "id" in table.c:
            self._ids[table.name], self._new[table.name] = {}, set()
            after = self._write.scalar(select(func.max(table.c.id))) or 0
        plain = "id" not in table.c and all(type(column.type) in PLAIN for column in table.c)
        insert = self._insert_plain(table) if plain else partial(self._insert, table, before=before, after=after)
        rows = self._read.execution_options(yield_per=ROWS_AT_ONCE).execute(
            select(table).order_by(*table.primary_key.columns)
        )
        for part in rows.partitions(ROWS_AT_ONCE):
            try:
                insert(part)
            except DataError as error:  # such as a number that PostgreSQL's integers do not hold
                reason = " ".join(str(error.orig).split())
                raise InputError(f"{database.shown(self._write.engine.url)}: table {table.name}: {reason}") from None
            done += len(part)
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                self._say(f"{table.name}: {done:,} of {total:,} rows")
        if "id" in table.c and done and self._write.dialect.name == "postgresql":
            name = f"pg_get_serial_sequence('{table.name}', 'id')"
            self._write.exec_driver_sql(f"SELECT setval({name}, (SELECT max(id) FROM {table.name}))")
        return (self._write.scalar(select(func.count()).select_from(table)) or 0) - before

    def _insert_plain(self, table: Table) -> Callable[[Sequence[Row[Any]]], None]:
        """Inserts numbers and text as the drivers take them: metrics are most of a ledger."""
        names = ", ".join(table.c.keys())
        arrays = ", ".join(f"%s::{PLAIN[type(column.type)]}[]" for column in table.c)
        source, by_column = f"SELECT * FROM unnest({arrays})", self._write.dialect.name == "postgresql"
        if not by_column:
            source = f"VALUES ({', '.join('?' for _ in table.c)})"
        statement = f"INSERT INTO {table.name} ({names}) {source} ON CONFLICT DO NOTHING"

        def insert(part: Sequence[Row[Any]]) -> None:
            columns = [list(values) for values in zip(*part, strict=True)]
            for values, column in zip(columns, table.c, strict=True):
                for key in column.foreign_keys:
                    values[:] = [self._id(table, key, number) for number in values]
            rows = tuple(map(_array, columns)) if by_column else [*zip(*columns, strict=True)]
            self._write.exec_driver_sql(statement, rows)

        return insert

    def _id(self, table: Table, key: ForeignKey, number: int) -> int:
        """The id here of a row that a row of `table` refers to."""
        parent = key.column.table.name
        try:
            return self._ids[parent][number]
        except KeyError:
            raise InputError(
                f"{database.shown(self._read.engine.url)}: is damaged: a row of table {table.name} refers to "
                f"{parent} {number}, which there is not"
            ) from None

    def _insert(self, table: Table, part: Sequence[Row[Any]], before: int, after: int) -> None:
        """Inserts the rows that the table does not have. before: its rows here. after: the largest id here."""
        rows = [dict(row._mapping) for row in part]
        for key in table.foreign_keys:
            column = key.parent.name
            for row in rows:
                if key.column.table.name in TRANSIENT:
                    row[column] = None
                elif row[column] is not None:
                    row[column] = self._id(table, key, row[column])
        insert = (postgresql if self._write.dialect.name == "postgresql" else sqlite).insert(table)
        if "id" in table.c:
            known = self._known(table, rows) if before else {}
            natural, fresh = _natural(table), []
            for row in rows:
                old = row["id"]
                have = known.get(tuple(row[column] for column in natural))
                if natural and have is not None:
                    self._ids[table.name][old] = have
                elif natural or self._of_new(table, row):
                    row["id"] = self._ids[table.name][old] = old + after
                    self._new[table.name].add(old + after)
                    fresh.append(row)
            rows = fresh
        elif before:
            insert = insert.on_conflict_do_nothing()
        if rows:
            self._write.execute(insert, rows)

    def _known(self, table: Table, rows: list[Values]) -> dict[tuple[Any, ...], int]:
        """The ids here of those rows that are here, by their natural keys."""
        columns = [table.c[name] for name in _natural(table)]
        found: dict[tuple[Any, ...], int] = {}
        for start in range(0, len(rows) if columns else 0, KEYS_AT_ONCE):
            keys = [tuple(row[column.name] for column in columns) for row in rows[start : start + KEYS_AT_ONCE]]
            for number, *key in self._write.execute(select(table.c.id, *columns).where(tuple_(*columns).in_(keys))):
                found[tuple(key)] = number
        return found

    def _of_new(self, table: Table, row: Values) -> bool:
        """Whether the row refers to one that came with the copy."""
        return any(row[key.parent.name] in self._new[key.column.table.name] for key in table.foreign_keys)


def _natural(table: Table) -> list[str]:
    """The columns that say which row is the same in two ledgers; none where a row belongs to the one it refers to."""
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            return [column.name for column in constraint.columns]
    return [column.name for column in table.c if column.unique]


def _array(values: Sequence[str | float]) -> str:
    r"""An array as PostgreSQL writes it; its driver takes longer for a list than for all the rest.

    >>> print(_array([1, 0.1, 'a "b"']))
    {1,0.1,"a \"b\""}
    """
    quoted = (
        '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
        for value in values
    )
    return "{" + ",".join(quoted) + "}"
