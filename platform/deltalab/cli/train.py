"""The command `deltalab train`."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from deltalab import progress
from deltalab.cli.options import AsJson, Db, Progress, print_result
from deltalab.errors import InputError


def train(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that deltalab export wrote.")],
    data: Annotated[Path | None, typer.Option("--data", help="Packed data, from deltalab data pack.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The run's folder; by default DIR/runs/NAME, with a NAME derived from the command."),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="torchtitan, or accelerate (transformers' Trainer).")
    ] = "torchtitan",
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs of this machine, all by default; 0 trains on CPUs.")
    ] = None,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Processes, where there is no GPU.")] = 1,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Machines; start the command on each.")] = 1,
    node_rank: Annotated[int, typer.Option("--node-rank", min=0, help="The number of this machine, from 0.")] = 0,
    address: Annotated[str | None, typer.Option("--address", metavar="HOST:PORT", help="Of machine 0.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Steps in place of the recipe's.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Change a key of the recipe for this run, such as optimizer.lr; repeatable.",
        ),
    ] = None,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="Print the first 200 losses of the trial that DIR comes from, trained again."),
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Train an exported folder on packed data, by torchtitan or transformers' Trainer.

    It prints the engine's own command and runs it. The same command again goes on from the newest complete checkpoint.
    """
    if trial:
        from deltalab.export import rebuild

        if as_json:
            print_result(as_json, "", folder=folder, losses=list(rebuild(folder)))
            return
        for step, loss in enumerate(rebuild(folder), start=1):
            print(f"{step} {loss!r}")
        return
    if data is None:
        raise InputError("--data: name packed data; `deltalab data pack` makes it")
    from deltalab.engines.launch import start
    from deltalab.engines.machines import Nodes
    from deltalab.engines.outcome import last_error
    from deltalab.engines.preparation import prepare

    launch = prepare(
        folder,
        data,
        run=out,
        engine=engine,
        gpus=gpus,
        processes=processes,
        nodes=Nodes(nodes, node_rank, address),
        steps=steps,
        given=settings or [],
    )
    say = progress.advance if as_json or progress.is_json() else _print_line
    log = launch.run / "log.txt"
    status = start(launch, say=say, record=None if node_rank else _recorder(db))
    if status:
        error = last_error(launch.run)
        print_result(
            as_json, f"{error}  (the whole output is in {log})", run=launch.run, state="failed", error=error, log=log
        )
        raise typer.Exit(1)
    text = f"{launch.run}: trained; deltalab export {launch.run} FOLDER makes a model of its newest checkpoint"
    print_result(as_json, text, run=launch.run, state="done", log=log)


def _print_line(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


def _recorder(db: str | None):  # type: ignore[no-untyped-def]
    """Returns a function that writes a run into the ledger, or None if SQLAlchemy is missing, as on a bare image."""
    if importlib.util.find_spec("sqlalchemy") is None:
        return None
    from deltalab.store import Store, trainings

    def record(run: Path) -> None:
        with Store.open(db) as store:
            trainings.record(store, run)

    return record
