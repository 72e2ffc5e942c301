"""The options and arguments that several commands take. Also finds the study that a user names, and prints results."""

import json
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltalab import progress
from deltalab.errors import InputError, unknown

MOST_WORKERS = 10_000
PIPED = 10_000
"""The width of a table that is no terminal's: each row is one line for the next command of a pipe."""


def _ledger(ctx: typer.Context, value: str | None) -> str | None:
    """Turns `shipped` into that ledger's file. Refuses a password, which `ps` shows as long as the command runs."""
    from deltalab.store.copies.shipped import SHIPPED, shipped_ledger
    from deltalab.store.database import without_password

    if value == SHIPPED and not ctx.resilient_parsing:
        return str(shipped_ledger(progress.advance))

    source = ctx.get_parameter_source("db")
    if value and source is not None and source.name == "COMMANDLINE" and without_password(value) != value:
        raise InputError(
            "--db: a password in a command's arguments is shown to other users by `ps`; "
            "give the URL by the environment variable DELTALAB_DB, or the password by PGPASSWORD or ~/.pgpass"
        )
    return value


def _tell_in(form: str) -> str:
    """Chooses the form of the lines on stderr."""
    if form not in get_args(progress.Form):
        raise unknown("form", form, get_args(progress.Form), where="--progress")
    progress.tell_in(form)  # type: ignore[arg-type]
    return form


def _not_of_a_queue(name: str) -> str:
    """Refuses an executor whose jobs wait in a queue: a proposal takes minutes, and a supernet this process."""
    if name not in ("ray", "inline"):
        raise unknown("executor", name, ("ray", "inline"), where="--executor")
    return name


def not_empty(value: str | None) -> str | None:
    """Refuses an option whose value is empty."""
    if value is not None and not value.strip():
        raise typer.BadParameter("is empty: name one, or leave the option out")
    return value


Db = Annotated[
    str | None,
    typer.Option(
        "--db",
        envvar="DELTALAB_DB",
        help="A file, a database URL, or `shipped` for the studies that come along; ./deltalab.db by default.",
        callback=_ledger,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; an error is JSON on stderr.")]
BackupEvery = Annotated[
    str | None,
    typer.Option(
        "--backup-every", metavar="TIME", help="Back up the database now and then, such as every 30s, 10m or 2h."
    ),
]
ExecutorHere = Annotated[
    str,
    typer.Option("--executor", help="ray, or inline for one stack at a time without Ray.", callback=_not_of_a_queue),
]
Folder = Annotated[Path, typer.Option("--folder", help="Where to write it.")]
LogTo = Annotated[
    list[str] | None,
    typer.Option("--log-to", metavar="NAME", help="Log it to wandb, mlflow or tensorboard, too; repeatable."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings in place of the file's, such as train.steps=100 seeds=7."),
]
Params = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
Profile = Annotated[str | None, typer.Option("--profile", help="One of the study's profiles.")]
Progress = Annotated[
    str,
    typer.Option("--progress", callback=_tell_in, help="text, or json: lines of JSON on stderr about how far it is."),
]
StudyFile = Annotated[
    Path, typer.Argument(metavar="FILE|NAME", help="A study's file, or the name of one in ./studies or shipped.")
]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="A study's NAME, NAME:PROFILE, id or file.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, max=MOST_WORKERS, help="Stacks of trials at a time.")]


def seconds(text: str, option: str) -> float:
    """Reads a time with its unit, such as 30s, 10m or 2h.

    Args:
        text: What the user gave.
        option: The name of the option, for the error.

    Returns:
        Seconds.

    Raises:
        InputError: The text is no number with one of the units.

    Examples:
        >>> seconds("10m", "--backup-every")
        600.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip())
    if match is None:
        raise InputError(f"'{text}' is no time: give a number with s, m or h, such as 10m", where=option, key=text)
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


def find_study(store: Any, study_name: str, profile: str | None, overrides: Sequence[str] | None = None) -> Any:
    """Returns the study in the database that the user names in a command.

    Args:
        store: The ledger.
        study_name: What the user gives as `StudyName`: NAME, NAME:PROFILE, id or file.
        profile: The profile of the study; None if `study_name` names it.
        overrides: The settings that the study ran with, as words KEY=VALUE.

    Raises:
        InputError: The database has no such study.
    """
    from deltalab.study.specs.overrides import read_overrides

    if study_name.endswith((".yaml", ".yml")):
        from deltalab.study.specs.study_file import load_study

        study_name = load_study(study_name, profile=profile, overrides=overrides).name
    return store.study(study_name, profile, read_overrides(overrides))


def latest_study(store: Any) -> str:
    """Returns the id of the study that began last.

    Raises:
        InputError: The database has no study.
    """
    ids = [study.id for study in store.studies()]
    if not ids:
        raise InputError("the ledger has no study yet", mend="deltalab study run makes one")
    return str(max(ids))


def wants_json() -> bool:
    """Returns whether the user's words ask for a result in JSON, also if the words are wrong."""
    return "--json" in _options()


def wants_json_errors() -> bool:
    """Returns whether the user's words ask for errors in JSON: by `--json`, or by `--progress json`."""
    words = _options()
    return wants_json() or "--progress=json" in words or ("--progress", "json") in pairwise(words)


def _options() -> list[str]:
    """Returns the user's words up to two dashes, after which no word is an option."""
    words = sys.argv[1:]
    return words[: words.index("--")] if "--" in words else words


def print_result(as_json: bool, text: str, **fields: Any) -> None:
    """Prints the result of a command: the text for people, or the fields as JSON, in which a path is its text."""
    print(json.dumps(fields, default=str) if as_json else text)


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints rows as a table, with their keys as its headers, or as JSON."""
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None, pad_edge=False)
    for key in rows[0] if rows else []:
        # Ids and names are typed into other commands, so they stay whole.
        table.add_column(key, no_wrap=key in ("id", "name"), overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else escape(str(value)) for value in row.values()))
    console = Console()
    if not console.is_terminal:
        console.width = PIPED
    console.print(table if rows else "nothing yet")
