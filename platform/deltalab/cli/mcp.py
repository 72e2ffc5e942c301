"""The command `platform mcp`."""

import sys
from typing import Annotated

import typer

from deltalab import progress
from deltalab.cli.options import AsJson, Db


def mcp(
    ctx: typer.Context,
    allow: Annotated[
        str, typer.Option("--allow", help="With commas: run, export. Without it, tools read and check, and no more.")
    ] = "",
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="The most minutes that a run may take.")] = 60.0,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Serve the platform's commands to a program, by the Model Context Protocol on stdin and stdout.

    Stdout holds the protocol alone. `--json` is for an error that hinders the start.
    """
    from deltalab.mcp.server import serve

    if sys.stdin.isatty():
        progress.note("waits for a client of the Model Context Protocol on stdin; Ctrl-C ends it")
    serve(ctx.obj, db, allow=[name.strip() for name in allow.split(",") if name.strip()], most_minutes=minutes)
