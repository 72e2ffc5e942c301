"""The commands `deltalab db ...`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from deltalab import progress
from deltalab.cli.options import AsJson, Db, Progress, print_result

db = typer.Typer(no_args_is_help=True, help="Look after the database.")


@db.command("upgrade")
def db_upgrade(db: Db = None, as_json: AsJson = False) -> None:
    """Migrate an older database to this version."""
    from deltalab.store import Store
    from deltalab.store.database import address, display_url

    Store.upgrade(db)
    if as_json:
        print_result(as_json, "", database=display_url(address(db)), state="upgraded")


@db.command("export")
def db_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new SQLite file.")],
    db: Db = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Copy the whole ledger to a file, which is a ledger itself (--db FILE), and which `import` takes."""
    from deltalab.store import Store
    from deltalab.store.copies.whole_ledger import export_ledger

    with Store.open(db, create=False) as store:
        rows = export_ledger(store, file, progress.advance)
    print_result(as_json, f"{file}: written: {_counts(rows)}", file=file, rows=rows)


@db.command("backup")
def db_backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file.")],
    db: Db = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Back up the ledger, also while studies run: an SQLite file that is a ledger itself, or PostgreSQL's archive."""
    from deltalab.store import Store
    from deltalab.store.copies.backup import back_up

    with Store.open(db, create=False) as store:
        back_up(store, file, progress.advance)
    size = file.stat().st_size
    print_result(as_json, f"{file}: written: {size / 1e6:.1f} MB", file=file, bytes=size)


@db.command("import")
def db_import(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|RUN...", help="Ledgers that `export` wrote; folders of runs of `deltalab train`."),
    ],
    db: Db = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Add ledgers of other machines to this one, and trainings from their folders; again, to bring them up to date."""
    from deltalab.store import Store
    from deltalab.store.copies.whole_ledger import import_ledger
    from deltalab.store.trainings import record, require_run

    for path in paths:  # A wrong path makes no ledger, and leaves no import half done.
        if path.is_dir():
            require_run(path)
        else:
            with Store.open(path, create=False):
                pass
    imported: list[dict[str, Any]] = []
    with Store.open(db) as store:
        for path in paths:
            if path.is_dir():
                record(store, path)
                imported.append({"path": str(path), "recorded": True})
                text = f"{path}: recorded"
            else:
                with Store.open(path, create=False) as source:
                    rows = import_ledger(store, source, progress.advance)
                imported.append({"path": str(path), "rows": rows})
                text = f"{path}: new: {_counts(rows)}"
            if not as_json:
                print(text)
    if as_json:
        print(json.dumps(imported))


@db.command("vacuum")
def db_vacuum(db: Db = None, as_json: AsJson = False) -> None:
    """Delete trials that no arm uses and rules that no trial uses, and free their space. Run it while no study runs."""
    from deltalab.store import Store
    from deltalab.store.copies.whole_ledger import size, vacuum

    with Store.open(db, create=False) as store:
        before = size(store)
        deleted = vacuum(store)
        after = size(store)
    counts = ", ".join(f"{rows} rows of {table}" for table, rows in deleted.items())
    text = f"deleted {counts}; {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB now"
    print_result(as_json, text, deleted=deleted, bytes_before=before, bytes=after)


def _counts(rows: dict[str, int]) -> str:
    """Returns the numbers of rows of a copy as text."""
    return ", ".join(f"{count:,} of {table}" for table, count in rows.items() if count) or "no rows"
