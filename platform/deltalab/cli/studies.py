"""The commands of `deltalab study` about a ledger's studies: list, diff, trace, tag, note, hide, delete, restore."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from deltalab import progress
from deltalab.cli.options import AsJson, Db, Profile, StudyName, find_study, print_result, print_rows
from deltalab.errors import InputError, unknown

if TYPE_CHECKING:
    from deltalab.store.records import TrialRow
    from deltalab.store.studies.shelf import ListedStudy
    from deltalab.study.reports.study_diff import SettingDiff, StudyDiff

StudyNames = Annotated[list[str], typer.Argument(metavar="STUDY...", help="A study's NAME, NAME:PROFILE, id or file.")]
Side = Annotated[
    str, typer.Argument(help="A study of the database by NAME, NAME:PROFILE or id; or FILE.yaml, FILE.yaml:PROFILE.")
]

console = Console()
MOST_NAMED = 3
"""The names of hidden studies that a list tells."""


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
        from deltalab.store.studies.shelf import has_words
        from deltalab.study.specs.study_file import load_study

        if tag or every or deleted:
            raise InputError("--shipped takes words alone: a shipped study has no tags, and none is hidden or deleted")
        studies = {name: load_study(name) for name in shipped_studies()}
        words = {name: (name, study.description, *study.arms) for name, study in studies.items()}
        matching = [name for name in studies if has_words(text, words[name])]
        _print([{"name": name, "about": studies[name].description} for name in matching], as_json)
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
    left_out = Counter(row.name for row in rows if row.hidden and not (every or as_json))
    if left_out:
        named = [f"{count} of {name}" for name, count in left_out.most_common(MOST_NAMED)]
        more = ", ..." if len(left_out) > MOST_NAMED else ""
        progress.note(f"{left_out.total()} hidden ({', '.join(named)}{more}): --all lists them, too")


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

    `deltalab study diff A A --arm base --arm no_d` compares two arms of one study.
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


def trace(
    study_name: StudyName,
    trial: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="The beginning of a trial's key; without it, all are listed.")
    ] = None,
    points: Annotated[int, typer.Option("--points", min=1, help="Points of a curve.")] = 50,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """List a study's trials with their keys; or show one: what it trained, seeds, curves, and why it failed."""
    from deltalab.store import Store
    from deltalab.store.studies.trials import curves_of, find_trial

    with Store.open(db, create=False) as store:
        study = find_study(store, study_name, profile)
        if trial is None:
            _print([_trial_row(row) for row in store.trials(study.id)], as_json)
            return
        details = find_trial(store, trial)
        held = [holder for holder in details.holders if holder.study_id == study.id]
        if not held:
            raise InputError(f"trial '{trial}' is no trial of this study", where=study.address, key=trial)
        points_of = curves_of(store, details.trial.id, max_points=points)
    curves: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for point in points_of:
        by_seed = curves.setdefault(f"{point.split}/{point.metric}", {})
        by_seed.setdefault(point.seed, []).append((point.step, point.value))
    row = details.trial
    traced: dict[str, Any] = {
        "key": row.key,
        "task": row.task,
        "stage": row.stage,
        "state": row.state,
        "arms": {holder.arm: holder.values for holder in held},
        "rule": details.rule.name,
        "seconds": row.seconds,
        "parameters": row.parameters,
        "seeds": [
            {
                "seed": seed.seed,
                "state": seed.state,
                "diverged_at": seed.diverged_at,
                "last": {f"{split}/{metric}": value for (split, metric), (_, value) in seed.finals.items()},
            }
            for seed in details.seeds
        ],
        "error": row.error,
        "config": row.config,
    }
    if as_json:
        print(json.dumps({**traced, "curves": curves}, default=str))
        return
    for key, value in traced.items():
        if key == "seeds":
            for seed in value:
                last = ", ".join(f"{name} {figure:.4g}" for name, figure in seed["last"].items())
                print(f"seed {seed['seed']}: {seed['state']}: {last}")
        elif value not in (None, {}):
            print(f"{key}: {json.dumps(value, default=str) if isinstance(value, dict) else value}")


def _trial_row(row: "TrialRow") -> dict[str, Any]:
    """Returns a trial as a row of the list. Its error is the last line of its traceback."""
    return {
        "key": row.key,
        "arm": row.arm,
        "task": row.task,
        "stage": row.stage,
        "state": row.state,
        "seeds": len(row.runs),
        "diverged": [str(seed) for seed, state in row.runs.items() if state == "diverged"],
        "values": row.values,
        "error": (row.error or "").strip().rpartition("\n")[2] or None,
    }


def tag(
    study_name: StudyName,
    tags: Annotated[list[str] | None, typer.Argument(metavar="[TAG]...", help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="A tag to take away.")] = None,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
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
    text = f"{study.address}: {', '.join(new_tags) or 'no tags'}"
    print_result(as_json, text, id=study.id, study=study.address, tags=list(new_tags))


def note(
    study_name: StudyName,
    text: Annotated[str | None, typer.Argument(help="The notes, in place of those before; '' for none.")] = None,
    db: Db = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Write notes about a study, or print them."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        study = find_study(store, study_name, profile)
        if text is not None:
            shelf.note(store, study.id, text)
    notes = (study.notes if text is None else text.strip()) or None
    print_result(as_json, f"{study.address}: {notes or 'no notes'}", id=study.id, study=study.address, notes=notes)


def hide(study_names: StudyNames, db: Db = None, as_json: AsJson = False) -> None:
    """Leave studies out of lists; `unhide` shows them again."""
    _hide(study_names, db, as_json, hidden=True)


def unhide(study_names: StudyNames, db: Db = None, as_json: AsJson = False) -> None:
    """Show hidden studies in lists again."""
    _hide(study_names, db, as_json, hidden=False)


def _hide(study_names: list[str], db: str | None, as_json: bool, *, hidden: bool) -> None:
    """Hides studies, or shows them again."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        for study in [find_study(store, name, None) for name in study_names]:
            shelf.hide(store, study.id, hidden)
            text = f"{study.address} (id {study.id}): {'hidden' if hidden else 'shown'}"
            print_result(as_json, text, id=study.id, study=study.address, hidden=hidden)


def delete(
    study_names: StudyNames,
    db: Db = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete studies, after a question. `restore` brings them back until `deltalab db vacuum` removes them for good."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        for study in [find_study(store, name, None) for name in study_names]:
            description = f"{study.address} (id {study.id}, {study.state}): {shelf.contents(store, study.id)}"
            if not yes:
                if not sys.stdin.isatty():
                    raise InputError(f"{description}: nobody is there to confirm; give --yes")
                if not typer.confirm(f"{description}. Delete it?", err=as_json):
                    print_result(as_json, "kept", id=study.id, study=study.address, deleted=False)
                    continue
            shelf.delete(store, study.id)
            text = f"{description}: deleted; `deltalab study restore {study.id}` brings it back"
            print_result(as_json, text, id=study.id, study=study.address, deleted=True)


def restore(
    study_name: Annotated[str, typer.Argument(metavar="STUDY", help="A deleted study's NAME, NAME:PROFILE or id.")],
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Bring a deleted study back."""
    from deltalab.store import Store
    from deltalab.store.studies import shelf

    with Store.open(db, create=False) as store:
        restored = shelf.restore(store, study_name)
    text = f"{restored.address} (id {restored.id}): restored"
    print_result(as_json, text, id=restored.id, study=restored.address, deleted=False)


COMMANDS: dict[str, Callable[..., None]] = {
    "list": listing,
    "diff": diff,
    "trace": trace,
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
        filled = [
            key for key in (rows[0] if rows else ()) if any(row[key] not in (None, [], {}, False) for row in rows)
        ]
        rows = [{key: _cell(row[key], key) for key in filled} for row in rows]
    print_rows(rows, as_json)


def _cell(value: Any, key: str) -> str:
    """Returns a value as a cell of the table."""
    if key == "created":
        return datetime.fromisoformat(value).strftime("%Y-%m-%d %H:%M UTC")
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={given}" for name, given in value.items())
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else str(value)
