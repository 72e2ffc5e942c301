"""The command `deltalab doctor`."""

import json
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deltalab.cli.options import AsJson, Db

MARKS = {"works": "[green]works[/]", "broken": "[bold red]BROKEN[/]", "absent": "[dim]absent[/]"}


def doctor(db: Db = None, as_json: AsJson = False) -> None:
    """Say what works on this machine, what is missing, and how to mend it. Exit 1 if something is broken."""
    from deltalab.cli.machine_commands.examination import examine

    console = Console()
    with Console(stderr=True).status("looking at packages, GPU, kernels, Ray and the database"):
        findings = list(examine(db))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            mend = f"\n-> {finding.mend}" if finding.mend else ""
            table.add_row(escape(finding.part), MARKS[finding.state], escape(finding.found + mend))
        console.print(table)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(1)
