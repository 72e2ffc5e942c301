"""The commands `platform study list, diff, tag, note, hide, unhide, delete and restore`, about studies of a ledger."""

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltalab.cli.options import AsJson, Db, Profile, StudyName, find_study, print_rows
from deltalab.errors import InputError, unknown

if TYPE_CHECKING:
    from deltalab.store.studies.shelf import ListedStudy
    from deltalab.study.reports.study_diff import SettingDiff, StudyDiff

StudyNames = Annotated[list[str], typer.Argument(metavar="STUDY...", help="A study's NAME, NAME:PROFILE, id or file.")]
Side = Annotated[
    str, typer.Argument(help="A study of the database by NAME, NAME:PROFILE or id; or FILE.yaml, FILE.yaml:PROFILE.")
]

console = Console()


def add_to(study: typer.Typer) -> None:
    """Adds the commands to the group `study`."""
    for name, command in COMMANDS.items():
        study.command(name)(command)


def listing(
    text: Annotated[
        str, typer.Argument(metavar="[TEXT]", help="Only studies with these words in name, tags, notes or arms.")
    ] = "",
    db: Db = None,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Only studies with this tag; all of several.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Hidden studies, too.")] = False,
    deleted: Annotated[bool, typer.Option("--deleted", help="Deleted studies instead.")] = False,
    shipped: Annotated[bool, typer.Option("--shipped", help="Those that come with deltalab instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the studies in the database, or those that come with deltalab, which run by their names."""
    if shipped:
        from deltalab.authoring.files.study_folder import shipped_studies
        from deltalab.study.specs.study_file import load_study

        _print([{"name": name, "about": load_study(name).description} for name in shipped_studies()], as_json)
        return
    from deltalab.store import Store
    from deltalab.store.studies import shelf
    from deltalab.store.studies.driver_status import study_progress
    from deltalab.study.reports.best_arm import best_arm_text

    with Store.open(db, create=False) as store:
        rows, arms, counts = shelf.listed(store, deleted=deleted), shelf.arm_names(store), shelf.trial_counts(store)
        running = study_progress(store, [row.id for row in rows if row.state == "running"])
    known_tags = sorted({word for row in rows for word in row.tags})
    for word in tag or []:
        if word not in known_tags:
            raise unknown("tag", word, known_tags)
    matches = [
        row
        for row in rows
        if row.says(text, arms.get(row.id, [])) and set(tag or []) <= set(row.tags) and (every or not row.hidden)
    ]
    table_rows = [_row(row, arms.get(row.id, []), counts.get(row.id, 0), best_arm_text(row.best)) for row in matches]
    for row in table_rows:
        row["progress"] = running[row["id"]].line if row["id"] in running else None
    _print(table_rows, as_json)
    left_out = sum(row.hidden for row in rows) if not (every or as_json) else 0
    if left_out:
        print(f"{left_out} hidden: --all lists them, too", file=sys.stderr)


def _row(row: "ListedStudy", arms: list[str], trials: int, best: str) -> dict[str, Any]:
    """Returns a study as a row of the list."""
    return {
        "id": row.id,
        "name": row.name,
        "profile": row.profile,
        "with": row.overridden or None,
        "state": row.state,
        "created": row.created_at.isoformat(timespec="seconds"),
        "arms": len(arms),
        "trials": trials,
        "best": best or None,
        "tags": list(row.tags),
        "notes": row.notes or None,
        "hidden": row.hidden,
    }


def diff(
    left: Side,
    right: Side,
    db: Db = None,
    arm: Annotated[list[str] | None, typer.Option("--arm", help="Compare this arm; give a second one for B.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what differs between two studies: what they compute, their settings, and what they ran with.

    `platform study diff A A --arm base --arm no_d` compares two arms of one study.
    """
    from deltalab.store import Store
    from deltalab.study.reports import study_diff as compared

    if len(arm or []) > 2:
        raise InputError("--arm: give one for both studies, or one for each")
    with ExitStack() as stack:
        store = stack.enter_context(Store.open(db, create=False)) if Store.exists(db) else None
        sides = [compared.find_side(address, store) for address in (left, right)]
    if arm:
        names = [arm[0], arm[-1]]
        rows = compared.arm_diff(*(compared.arm_settings(side, name) for side, name in zip(sides, names, strict=True)))
        labels = [f"{name} of {side.label}" for name, side in zip(names, sides, strict=True)]
        if as_json:
            print(json.dumps({"left": labels[0], "right": labels[1], "arms": [asdict(row) for row in rows]}))
        elif rows:
            _print_changes("Settings", labels[0], labels[1], rows)
        else:
            print(f"{labels[0]} and {labels[1]} have the same settings on the tasks that both have")
        return
    differences = compared.study_diff(*sides)
    if as_json:
        print(json.dumps(differences.to_dict()))
    else:
        _print_diff(differences)


def _print_diff(diff: "StudyDiff") -> None:
    """Prints the differences of two studies."""
    if diff.same:
        print(f"{diff.left} and {diff.right} compute the same: they share their trials.")
    parts = {"What they compute": diff.identity, "Study": diff.settings, "Arms": diff.arms, "Ran with": diff.ran}
    for title, rows in parts.items():
        if rows:
            _print_changes(title, diff.left, diff.right, rows)
    for label, names in ((diff.left, diff.only_left), (diff.right, diff.only_right)):
        if names:
            print(f"\nOnly {label} has: {', '.join(names)}")
    if not diff.same and not (any(parts.values()) or diff.only_left or diff.only_right):
        print(f"{diff.left} and {diff.right} differ in nothing that the ledger holds, but ran with other releases.")


def _print_changes(title: str, left: str, right: str, rows: "list[SettingDiff]") -> None:
    """Prints a table of settings that differ."""
    from deltalab.study.specs.setting_text import setting_text

    table = Table(box=None, pad_edge=False, title=f"\n{title}", title_justify="left")
    for name in ("setting", left, right, *(["where"] if any(row.where for row in rows) else [])):
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        cells = row.key, setting_text(row.left), setting_text(row.right), ", ".join(row.where)
        table.add_row(*(Text(cell) for cell in cells[: len(table.columns)]))
    console.print(table)


def tag(
    study_name: StudyName,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="A tag to take away.")] = None,
    db: Db = None,
    profile: Profile = None,
) -> None:
    """Add tags to a study, or take them away, and print those that it has."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        study = find_study(store, study_name, profile)
        for word in remove or []:
            if word not in study.tags:
                raise unknown("tag", word, study.tags, where=study.address)
        new_tags = [word for word in [*study.tags, *(tags or [])] if word not in (remove or [])]
        if tags or remove:
            shelf.tag(store, study.id, new_tags)
            new_tags = store.study(study.id).tags
    print(f"{study.address}: {', '.join(new_tags) or 'no tags'}")


def note(
    study_name: StudyName,
    text: Annotated[str | None, typer.Argument(help="The notes, in place of those before; '' for none.")] = None,
    db: Db = None,
    profile: Profile = None,
) -> None:
    """Write notes about a study, or print them."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        study = find_study(store, study_name, profile)
        if text is not None:
            shelf.note(store, study.id, text)
    print(f"{study.address}: {(study.notes if text is None else text.strip()) or 'no notes'}")


def hide(study_names: StudyNames, db: Db = None) -> None:
    """Leave studies out of lists; `unhide` shows them again."""
    _hide(study_names, db, hidden=True)


def unhide(study_names: StudyNames, db: Db = None) -> None:
    """Show hidden studies in lists again."""
    _hide(study_names, db, hidden=False)


def _hide(study_names: list[str], db: str | None, *, hidden: bool) -> None:
    """Hides studies, or shows them again."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        for study in [find_study(store, name, None) for name in study_names]:
            shelf.hide(store, study.id, hidden)
            print(f"{study.address} (id {study.id}): {'hidden' if hidden else 'shown'}")


def delete(
    study_names: StudyNames,
    db: Db = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete studies, after a question. `restore` brings them back until `platform db vacuum` removes them for good."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        for study in [find_study(store, name, None) for name in study_names]:
            description = f"{study.address} (id {study.id}, {study.state}): {shelf.contents(store, study.id)}"
            if not yes:
                if not sys.stdin.isatty():
                    raise InputError(f"{description}: nobody is there to confirm; give --yes")
                if not typer.confirm(f"{description}. Delete it?"):
                    print("kept")
                    continue
            shelf.delete(store, study.id)
            print(f"{description}: deleted; `platform study restore {study.id}` brings it back")


def restore(
    study_name: Annotated[str, typer.Argument(metavar="STUDY", help="A deleted study's NAME, NAME:PROFILE or id.")],
    db: Db = None,
) -> None:
    """Bring a deleted study back."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        restored = shelf.restore(store, study_name)
    print(f"{restored.address} (id {restored.id}): restored")


COMMANDS: dict[str, Callable[..., None]] = {
    "list": listing,
    "diff": diff,
    "tag": tag,
    "note": note,
    "hide": hide,
    "unhide": unhide,
    "delete": delete,
    "restore": restore,
}


def _print(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Prints JSON, or a table without the columns that are empty in all rows."""
    if not as_json:
        filled = [key for key in (rows[0] if rows else ()) if any(row[key] not in (None, [], False) for row in rows)]
        rows = [{key: _cell(row[key], key) for key in filled} for row in rows]
    print_rows(rows, as_json)


def _cell(value: Any, key: str) -> str:
    """Returns a value as a cell of the table."""
    if key == "created":
        return datetime.fromisoformat(value).strftime("%Y-%m-%d %H:%M UTC")
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)
