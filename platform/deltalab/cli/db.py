"""The commands `platform db ...`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from deltalab.cli.options import Db

db = typer.Typer(no_args_is_help=True, help="Look after the database.")


@db.command("upgrade")
def db_upgrade(db: Db = None) -> None:
    """Migrate an older database to this version."""
    from deltalab.store import Store

    Store.upgrade(db)


@db.command("export")
def db_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new SQLite file.")],
    db: Db = None,
) -> None:
    """Copy the whole ledger to a file, which is a ledger itself (--db FILE), and which `import` takes."""
    from deltalab.store import Store
    from deltalab.store.copy import export_ledger

    with Store.open(db, create=False) as store:
        _print_rows_of(file, export_ledger(store, file, _print_progress), "written")


@db.command("import")
def db_import(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|RUN...", help="Ledgers that `export` wrote; folders of runs of `platform train`."),
    ],
    db: Db = None,
) -> None:
    """Add ledgers of other machines to this one, and trainings from their folders; again, to bring them up to date."""
    from deltalab.store import Store
    from deltalab.store.copy import import_ledger
    from deltalab.store.trainings import record

    with Store.open(db) as store:
        for path in paths:
            if path.is_dir():
                record(store, path)
                print(f"{path}: recorded")
            else:
                with Store.open(path, create=False) as source:
                    _print_rows_of(path, import_ledger(store, source, _print_progress), "new")


@db.command("vacuum")
def db_vacuum(db: Db = None) -> None:
    """Delete trials that no arm uses and rules that no trial uses, and free their space. Run it while no study runs."""
    from deltalab.store import Store
    from deltalab.store.copy import size, vacuum

    with Store.open(db, create=False) as store:
        before = size(store)
        deleted = vacuum(store)
        counts = ", ".join(f"{rows} rows of {table}" for table, rows in deleted.items())
        print(f"deleted {counts}; {before / 1e6:.1f} MB before, {size(store) / 1e6:.1f} MB now")


def _print_progress(line: str) -> None:
    """Prints a line about the progress on stderr."""
    print(line, file=sys.stderr, flush=True)


def _print_rows_of(path: Path, rows: dict[str, int], what: str) -> None:
    """Prints the numbers of rows of a copy."""
    counts = ", ".join(f"{count:,} of {table}" for table, count in rows.items() if count)
    print(f"{path}: {what}: {counts or 'no rows'}")
