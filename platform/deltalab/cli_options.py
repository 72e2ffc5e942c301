"""Options and arguments that several commands take, and what they name."""

from pathlib import Path
from typing import Annotated, Any

import typer

Db = Annotated[
    str | None,
    typer.Option("--db", envvar="DELTALAB_DB", help="A file or a database URL; ./deltalab.db by default."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[Path, typer.Option("--folder", help="Where to write it.")]
Params = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...")]
Profile = Annotated[str | None, typer.Option("--profile", help="One of the study's profiles.")]
StudyFile = Annotated[
    Path, typer.Argument(metavar="FILE|NAME", help="A study's file, or the name of one in ./studies or shipped.")
]
StudyName = Annotated[str, typer.Argument(metavar="STUDY", help="A study's NAME, NAME:PROFILE, id or file.")]


def find_study(store: Any, name: str, profile: str | None) -> Any:
    """The study that `StudyName` names. Raises `InputError` where the database has none."""
    if name.endswith((".yaml", ".yml")):
        from deltalab.study.spec import load_study

        name = load_study(name, profile=profile).name
    return store.study(name, profile)
