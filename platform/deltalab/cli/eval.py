"""The command `platform eval`."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from deltalab.cli.options import AsJson, Db
from deltalab.data.token_shards import SPLITS
from deltalab.errors import unknown


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An exported folder, a run of platform train, one of its checkpoints, or a folder or Hub name of "
            "transformers.",
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="With commas: loss, needle, needle_text, proxy, and names or YAML files of lm-evaluation-harness.",
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Packed data; by default, those of the training.")] = None,
    split: Annotated[str, typer.Option("--split", help="Which split of the packed data.")] = "validation",
    length: Annotated[int | None, typer.Option("--length", min=1, help="Tokens of a training sequence.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Examples of each task.")] = None,
    include: Annotated[
        Path | None, typer.Option("--include", help="A folder with YAML files of further tasks of the harness.")
    ] = None,
    few_shot: Annotated[
        int | None, typer.Option("--few-shot", min=0, help="Solved examples before a question of the harness.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Questions of the harness answered together.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=1, help="Most tokens of a question of the harness.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the code of a model that is not deltalab's.")
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model: loss by length, retrieval, its proxy task, and lm-evaluation-harness.

    Results go to evaluations.json in the folder, or in evaluations/NAME for a Hub name; those of a training also into
    the ledger that has it.
    """
    from deltalab.evaluation import evaluate as evaluating
    from deltalab.evaluation.harness import HarnessOptions
    from deltalab.evaluation.model_folder import open_model
    from deltalab.evaluation.results import fingerprint, write
    from deltalab.store import Store
    from deltalab.store.trainings import add_evaluations, record

    if split not in SPLITS:
        raise unknown("split", split, SPLITS, where="--split")
    with open_model(model, trusted=trust) as folder:
        data = data or folder.data
        task_names = [task.strip() for task in (tasks or "").split(",") if task.strip()]
        packed_data = None if data is None else evaluating.packed(data)
        left_out: dict[str, str] = {}
        if not task_names:
            task_names, left_out = evaluating.askable(folder, packed_data, split=split, length=length)
        results = evaluating.evaluate(
            folder,
            task_names,
            data=packed_data,
            split=split,
            length=length,
            limit=limit,
            include=include,
            options=HarnessOptions(few_shot, batch_size, max_length),
        )
        of_hub = isinstance(folder.path, str)
        weights = str(folder.path) if isinstance(folder.path, str) else fingerprint(folder.path)
        about = {"weights": weights, "data": None if data is None else str(data)}
    directory = Path("evaluations", model.replace("/", "--")) if of_hub else folder.run or Path(model)
    directory.mkdir(parents=True, exist_ok=True)
    file = write(results, directory, about)
    summary = f"{file}: {len(results)} values"
    if folder.training is not None and Store.exists(db):
        with Store.open(db, create=False) as store:
            if folder.run is not None:
                record(store, folder.run)
                summary += ", also in the ledger"
            elif add_evaluations(store, folder.training, [asdict(result) for result in results]):
                summary += ", also in the ledger"
            else:
                summary += f"; the ledger has no training {folder.training}: `platform db import RUN` records it"
    for task, reason in left_out.items():
        print(f"left out {task}: {reason}", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(result) for result in results]))
        return
    table = Table(box=None, pad_edge=False)
    for column in ("task", "metric", "value", "stderr", "examples"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right")
    for result in results:
        stderr = "" if result.stderr is None else f"{result.stderr:.4f}"
        examples = "" if result.examples is None else f"{result.examples:,}"
        table.add_row(result.task, result.metric, f"{result.value:.4f}", stderr, examples)
    console = Console()
    console.print(table)
    console.print(summary, markup=False, highlight=False, soft_wrap=True)
