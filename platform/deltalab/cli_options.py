"""Options and arguments that several commands take."""

from pathlib import Path
from typing import Annotated

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
