"""Copies a whole ledger from one database to another, and compacts a database. A copy that fails changes nothing."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    CursorResult,
    Double,
    ForeignKey,
    Integer,
    Row,
    Select,
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
from sqlalchemy.exc import DataError, IntegrityError

from deltalab.errors import InputError
from deltalab.store import database
from deltalab.store.ledger import Store
from deltalab.store.models import TRANSIENT, ArmTrial, Base, RuleVersion, Study, Trial

ROWS_AT_ONCE = 5000
KEYS_AT_ONCE = 300
"""The number of keys in one statement. Databases limit how many values a statement may have."""
PARENTS_AT_ONCE = 1000
"""The number of rows whose plain rows are copied in one statement, between two reports."""
ATTACHED = "source"
"""The name of an attached ledger in statements."""
SAY_SECONDS = 5.0
PLAIN = {Integer: "integer", String: "text", Double: "double precision"}
"""Types of columns, each with its name in PostgreSQL. SQLite and PostgreSQL give and take their values unchanged."""

Say = Callable[[str], None]
Values = dict[str, Any]


def export_ledger(store: Store, file: str | Path, say: Say) -> dict[str, int]:
    """Writes the whole ledger to a new SQLite file, which is a ledger itself. If this fails, no file is left.

    Args:
        say: Is called with a line about the progress now and then.

    Returns:
        The number of rows of each table.

    Raises:
        InputError: The file exists or cannot be written.
    """
    url = database.address(file)
    if url.get_backend_name() != "sqlite":
        raise InputError("export writes a file; `deltalab db import FILE --db URL` fills another database with it")
    target = Path(str(url.database))
    if target.exists():
        raise InputError(f"{target}: exists; give the path of a new file")
    unfinished = target.with_name(f".{target.name}.partial")
    files = [unfinished.with_name(unfinished.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
    _remove(files)  # an export that was killed may have left them
    try:
        with Store.open(unfinished) as target_store:
            counts = import_ledger(target_store, store, say)
            with _writing(target_store, isolation_level="AUTOCOMMIT") as connection:
                connection.exec_driver_sql("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
        unfinished.replace(target)
    finally:
        _remove(files)
    return counts


def _remove(files: Iterable[Path]) -> None:
    """Deletes files that may not exist."""
    for file in files:
        file.unlink(missing_ok=True)


def import_ledger(store: Store, source: Store, say: Say) -> dict[str, int]:
    """Adds everything in the ledger `source` to the ledger `store` in one transaction, or nothing if this fails.

    Studies with the same identity, trials with the same key, rules with the same source, and so on, are the same in
    both ledgers. Rows that `store` already has stay as they are. New rows keep their ids if the table in `store` was
    empty. Otherwise, the largest id that the table had is added to each new id. Other writers wait during the import.

    Args:
        store: The ledger to fill.
        source: The ledger to read.
        say: Is called with a line about the progress now and then.

    Returns:
        The number of new rows of each table.

    Raises:
        InputError: A database cannot be read or written.
    """
    with _copying(store, source, say) as (copy, writer):
        counts = {table.name: copy.table(table) for table in Base.metadata.sorted_tables if table.name not in TRANSIENT}
        if writer.dialect.name == "postgresql":  # otherwise it plans for the old sizes until autovacuum
            writer.exec_driver_sql(f"ANALYZE {', '.join(counts)}")
        return counts


def vacuum(store: Store) -> dict[str, int]:
    """Removes rows that no reader can see, and gives free space back to the disk.

    It removes for good the studies that were deleted, the trials that no arm uses, and the rules that no trial uses.

    Returns:
        The number of removed rows of each table.

    Raises:
        InputError: Other processes use the database all the time, or the disk has no room for the temporary copy.
    """
    with _writing(store, writes=True) as connection:
        deleted_studies = Study.deleted_at.is_not(None)
        trials_of_no_arm = Trial.id.not_in(select(ArmTrial.trial_id))
        rules_of_no_trial = RuleVersion.id.not_in(select(Trial.rule_version_id))
        deleted = {
            table.__tablename__: connection.execute(delete(table).where(condition)).rowcount
            for table, condition in (
                (Study, deleted_studies),
                (Trial, trials_of_no_arm),
                (RuleVersion, rules_of_no_trial),
            )
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
    """Returns the size of the database in bytes."""
    query = "SELECT pg_database_size(current_database())"
    if store._engine.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    with store._reading() as session:
        return int(session.scalar(text(query)) or 0)


@contextmanager
def _reading(store: Store) -> Iterator[Connection]:
    """Opens a connection that sees one snapshot of the ledger, however long reading takes."""
    engine = store._engine
    if engine.name == "postgresql":
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with database.input_errors(engine.url), engine.connect() as connection:
        yield connection


@contextmanager
def _writing(store: Store, **options: Any) -> Iterator[Connection]:
    """Opens a transaction that writes."""
    with database.input_errors(store._engine.url), store._engine.execution_options(**options).begin() as connection:
        yield connection


@contextmanager
def _copying(store: Store, source: Store, say: Say) -> Iterator[tuple["_Copy", Connection]]:
    """Opens a copy from one snapshot of `source` to `store`, in one transaction, with the connection that writes."""
    url = source._engine.url
    if store._engine.name != "sqlite" or not database.may_attach(url):
        with _reading(source) as reader, _writing(store, writes=True) as writer:
            yield _Copy(reader, writer, say), writer
        return
    with _writing(store, writes=True) as writer:
        writer.detach()  # the pool is to have no connection with another file
        # Until SQLite has read the schema of a file, it finds a table without the name of its file in another one.
        writer.execution_options(schema_translate_map={None: "main"})
        with database.input_errors(url):
            writer.exec_driver_sql(f"ATTACH ? AS {ATTACHED}", (str(url.database),))
        yield _Attached(writer, url, say), writer


class _Copy:
    """Copies tables. A table is copied after the tables to which its rows refer.

    Attributes:
        _ids: table -> the id of a row in the source -> the id of the same row in the target.
        _new: table -> the ids of the rows that the copy added to the target.
        _where: Where a statement finds the source's tables, as options of its execution.
    """

    _where: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, reader: Connection, writer: Connection, say: Say) -> None:
        self._reader, self._writer, self._say = reader, writer, say
        self._source = reader.engine.url
        self._ids: dict[str, dict[int, int]] = {}
        self._new: dict[str, set[int]] = {}

    def table(self, table: Table) -> int:
        """Copies a table's rows, and returns how many are new."""
        before = self._writer.scalar(select(func.count()).select_from(table)) or 0
        largest_id = 0
        if "id" in table.c:
            self._ids[table.name], self._new[table.name] = {}, set()
            largest_id = self._writer.scalar(select(func.max(table.c.id))) or 0
        try:
            if "id" not in table.c and all(type(column.type) in PLAIN for column in table.c):
                self._copy_plain(table)
            else:
                self._copy_rows(table, partial(self._insert, table, before=before, largest_id=largest_id))
        except (DataError, IntegrityError) as error:
            # Such as a number that PostgreSQL's integers do not hold; or a row without a value, as no ledger has one.
            where, what = (
                (self._writer.engine.url, "") if isinstance(error, DataError) else (self._source, "is damaged: ")
            )
            reason = " ".join(str(error.orig).split())
            raise InputError(f"{database.display_url(where)}: {what}table {table.name}: {reason}") from None
        if self._ids.get(table.name) and self._writer.dialect.name == "postgresql":
            name = f"pg_get_serial_sequence('{table.name}', 'id')"
            self._writer.exec_driver_sql(f"SELECT setval({name}, (SELECT max(id) FROM {table.name}))")
        return (self._writer.scalar(select(func.count()).select_from(table)) or 0) - before

    def _copy_rows(self, table: Table, insert: Callable[[Sequence[Row[Any]]], None]) -> None:
        """Reads a table's rows, and has `insert` add them part by part."""
        read_rows, said_at = 0, time.monotonic()
        total = self._read(select(func.count()).select_from(table)).scalar() or 0
        for part in self._parts(self._read(select(table).order_by(*table.primary_key.columns), yield_per=ROWS_AT_ONCE)):
            insert(part)
            read_rows += len(part)
            if time.monotonic() - said_at > SAY_SECONDS:
                said_at = time.monotonic()
                self._say(f"{table.name}: {read_rows:,} of {total:,} rows")

    def _read(self, statement: Select[Any], **options: Any) -> CursorResult[Any]:
        """Begins to read in the source."""
        with database.input_errors(self._source):
            return self._reader.execute(statement, execution_options={**self._where, **options})

    def _parts(self, rows: CursorResult[Any]) -> Iterator[Sequence[Row[Any]]]:
        """Reads rows part by part. What cannot be read is damaged in the source."""
        with database.input_errors(self._source):
            yield from rows.partitions(ROWS_AT_ONCE)

    def _copy_plain(self, table: Table) -> None:
        """Copies rows of numbers and text quickly. Most rows of a ledger are metrics."""
        self._copy_rows(table, self._insert_plain(table))

    def _insert_plain(self, table: Table) -> Callable[[Sequence[Row[Any]]], None]:
        """Returns a function that inserts rows of numbers and text."""
        names = ", ".join(table.c.keys())
        arrays = ", ".join(f"%s::{PLAIN[type(column.type)]}[]" for column in table.c)
        source, by_column = f"SELECT * FROM unnest({arrays})", self._writer.dialect.name == "postgresql"
        if not by_column:
            source = f"VALUES ({', '.join('?' for _ in table.c)})"
        statement = f"INSERT INTO {table.name} ({names}) {source} ON CONFLICT DO NOTHING"

        def insert(part: Sequence[Row[Any]]) -> None:
            columns: list[Sequence[Any]] = [*zip(*part, strict=True)]
            for i, column in enumerate(table.c):
                for key in column.foreign_keys:
                    ids = {number: self._id(table, key, number) for number in set(columns[i])}
                    columns[i] = [*map(ids.__getitem__, columns[i])]
            rows = tuple(map(_array, columns)) if by_column else [*zip(*columns, strict=True)]
            self._writer.exec_driver_sql(statement, rows)

        return insert

    def _id(self, table: Table, key: ForeignKey, number: int) -> int:
        """Returns the id in the target of the row `number` of the source. A row of `table` refers to it by `key`."""
        parent = key.column.table.name
        try:
            return self._ids[parent][number]
        except KeyError:
            raise self._refers_to_nothing(table, parent, number) from None

    def _refers_to_nothing(self, table: Table, parent: str, number: int) -> InputError:
        return InputError(
            f"{database.display_url(self._source)}: is damaged: a row of table {table.name} refers to "
            f"{parent} {number}, which there is not"
        )

    def _insert(self, table: Table, part: Sequence[Row[Any]], before: int, largest_id: int) -> None:
        """Inserts the rows that the table lacks. `before` and `largest_id` are its rows and largest id so far."""
        rows = [dict(row._mapping) for row in part]
        for key in table.foreign_keys:
            column = key.parent.name
            for row in rows:
                if key.column.table.name in TRANSIENT:
                    row[column] = None
                elif row[column] is not None:
                    row[column] = self._id(table, key, row[column])
        insert = (postgresql if self._writer.dialect.name == "postgresql" else sqlite).insert(table)
        if "id" in table.c:
            known_ids = self._known(table, rows) if before else {}
            key_columns, new_rows = _natural(table), []
            for row in rows:
                source_id = row["id"]
                known_id = known_ids.get(tuple(row[column] for column in key_columns))
                if key_columns and known_id is not None:
                    self._ids[table.name][source_id] = known_id
                elif key_columns or self._of_new(table, row):
                    row["id"] = self._ids[table.name][source_id] = source_id + largest_id
                    self._new[table.name].add(source_id + largest_id)
                    new_rows.append(row)
            rows = new_rows
        elif before:
            insert = insert.on_conflict_do_nothing()
        if rows:
            self._writer.execute(insert, rows)

    def _known(self, table: Table, rows: list[Values]) -> dict[tuple[Any, ...], int]:
        """Returns the rows that the target already has: natural key -> id in the target."""
        columns = [table.c[name] for name in _natural(table)]
        ids: dict[tuple[Any, ...], int] = {}
        for start in range(0, len(rows) if columns else 0, KEYS_AT_ONCE):
            keys = [tuple(row[column.name] for column in columns) for row in rows[start : start + KEYS_AT_ONCE]]
            for number, *key in self._writer.execute(select(table.c.id, *columns).where(tuple_(*columns).in_(keys))):
                ids[tuple(key)] = number
        return ids

    def _of_new(self, table: Table, row: Values) -> bool:
        """Returns whether the row refers to a row that the copy added."""
        return any(row[key.parent.name] in self._new[key.column.table.name] for key in table.foreign_keys)


class _Attached(_Copy):
    """Copies tables from a file of SQLite to another one, where SQLite itself copies the plain rows."""

    _where = MappingProxyType({"schema_translate_map": {None: ATTACHED}})

    def __init__(self, writer: Connection, source: URL, say: Say) -> None:
        super().__init__(writer, writer, say)
        self._source = source

    def _copy_plain(self, table: Table) -> None:
        [key] = table.foreign_keys
        column, parent = key.parent.name, key.column.table.name
        ids = sorted(self._ids[parent].items())
        self._writer.exec_driver_sql("CREATE TABLE temp.same (old INTEGER PRIMARY KEY, new INTEGER)")
        if ids:
            self._writer.exec_driver_sql("INSERT INTO temp.same VALUES (?, ?)", ids)
        self._check_plain(table, column, parent)
        names = table.c.keys()
        values = ", ".join("new" if name == column else name for name in names)
        said_at = time.monotonic()
        for start in range(0, len(ids), PARENTS_AT_ONCE):
            part = ids[start : start + PARENTS_AT_ONCE]
            self._writer.exec_driver_sql(
                f"INSERT INTO main.{table.name} ({', '.join(names)}) SELECT {values} FROM temp.same "
                f"JOIN {ATTACHED}.{table.name} ON {column} = old WHERE old BETWEEN ? AND ? ON CONFLICT DO NOTHING",
                (part[0][0], part[-1][0]),
            )
            if time.monotonic() - said_at > SAY_SECONDS:
                said_at = time.monotonic()
                self._say(f"{table.name}: those of {start + len(part):,} of {len(ids):,} rows of {parent}")
        self._writer.exec_driver_sql("DROP TABLE temp.same")

    def _check_plain(self, table: Table, column: str, parent: str) -> None:
        """Raises `InputError` for a row that refers to nothing, and for a text that cannot be read."""
        orphan = (
            f"SELECT {column} FROM {ATTACHED}.{table.name} WHERE {column} NOT IN (SELECT old FROM temp.same) LIMIT 1"
        )
        texts = ", ".join(one.name for one in table.c if isinstance(one.type, String))
        with database.input_errors(self._source):
            for number in self._writer.exec_driver_sql(orphan).scalars():
                raise self._refers_to_nothing(table, parent, number)
            for _ in self._writer.exec_driver_sql(f"SELECT DISTINCT {texts} FROM {ATTACHED}.{table.name}"):
                pass  # reads each text


def _natural(table: Table) -> list[str]:
    """Returns the columns of a table's natural key. Rows of two ledgers with the same natural key are the same row.

    The list is empty for a table without a natural key. Its rows belong to the rows to which they refer.
    """
    for constraint in table.constraints:
        if isinstance(constraint, UniqueConstraint):
            return [column.name for column in constraint.columns]
    return [column.name for column in table.c if column.unique]


def _array(values: Sequence[str | float]) -> str:
    r"""Returns an array in PostgreSQL's notation.

    PostgreSQL's driver would take longer to convert a list than for all the rest of an insert.

    >>> print(_array([1, 0.1, 'a "b"']))
    {1,0.1,"a \"b\""}
    """
    quoted = (
        '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(value, str) else repr(value)
        for value in values
    )
    return "{" + ",".join(quoted) + "}"
