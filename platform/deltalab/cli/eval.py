"""The command `deltalab eval`."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deltalab import progress
from deltalab.cli.options import AsJson, Db, Progress, print_rows, wants_json
from deltalab.data.token_shards import SPLITS
from deltalab.errors import InputError, unknown

if TYPE_CHECKING:
    from deltalab.evaluation.compare import Compared
    from deltalab.evaluation.harness import HarnessOptions
    from deltalab.evaluation.model_folder import ModelFolder
    from deltalab.evaluation.results import Result


def _numbers(words: str | None) -> list[int]:
    """The whole numbers that a user lists with commas."""
    from deltalab.tasks.task import MOST_LENGTH

    numbers = [word.strip() for word in (words or "").split(",") if word.strip()]
    if wrong := [word for word in numbers if not word.isdecimal() or not int(word)]:
        raise InputError(f"--lengths: '{wrong[0]}' is no number of tokens: give it as 1024,2048")
    if long := [word for word in numbers if int(word) > MOST_LENGTH]:
        raise InputError(f"--lengths: {long[0]} tokens are too many: at most {MOST_LENGTH}")
    return [int(word) for word in numbers]


def _require_readers(
    tasks: Sequence[str], suites: Sequence[str], options: "HarnessOptions", include: Path | None
) -> None:
    """Raises `InputError` for an option that none of the tasks and suites reads."""
    from deltalab.evaluation.results import OWN
    from deltalab.evaluation.suites.suite import chosen

    asked_by = {suite.asked_by for suite, _ in chosen(suites)}
    of_harness, generated = any(task not in OWN for task in tasks), bool(asked_by & {"recall", "ruler"})
    harness = of_harness or "harness" in asked_by
    for option, value, is_read, readers in (
        ("--include", include, of_harness, "tasks of lm-evaluation-harness that --tasks names"),
        ("--few-shot", options.few_shot, harness, "tasks of lm-evaluation-harness"),
        ("--max-length", options.max_length, harness, "tasks of lm-evaluation-harness"),
        ("--batch-size", options.batch_size, harness or generated, "tasks of lm-evaluation-harness and suites but lm"),
        ("--files", options.files, harness or generated, "tasks of lm-evaluation-harness and suites but lm"),
    ):
        if value is not None and not is_read:
            raise InputError(f"{option}: only {readers} read it, and none is asked: leave it out")


def _list_suites(wanted: bool) -> None:
    """Prints the suites, with what each of their tasks needs, and ends the command."""
    if not wanted:
        return
    from deltalab.evaluation.suites.suite import load_suite, suite_names

    rows: list[dict[str, Any]] = []
    for suite in map(load_suite, suite_names()):
        for task in suite.tasks:
            metrics = ", ".join(filter(None, (task.metric, *task.also))) or "all"
            rows.append({"name": f"{suite.name}/{task.name}", "metrics": metrics, "needs": ", ".join(task.needs)})
    print_rows(rows, wants_json())
    raise typer.Exit


def evaluate(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="An exported folder, a run of deltalab train, one of its checkpoints, or a folder or Hub name of "
            "transformers. Further models are compared with the first.",
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="With commas: loss, needle, needle_multikey, needle_multivalue, needle_multiquery, needle_text, "
            "proxy, and names or YAML files of lm-evaluation-harness.",
        ),
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option("--suite", metavar="NAME", help="With commas: suites, or SUITE/TASK; --suites lists them."),
    ] = None,
    suites: Annotated[
        bool,
        typer.Option("--suites", help="List the suites and what each needs.", callback=_list_suites, is_eager=True),
    ] = False,
    files: Annotated[
        Path | None, typer.Option("--files", help="A folder with copies of the data sets, in place of the Hub.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="With commas: tokens of the texts of recall and ruler.")
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
        bool,
        typer.Option(
            "--trust-remote-code",
            "--trust",
            help="Run a model's code that is not as this version of deltalab writes it.",
        ),
    ] = False,
    db: Db = None,
    as_json: AsJson = False,
    progress_form: Progress = "text",
) -> None:
    """Measure models: loss by length, retrieval, their proxy task, and lm-evaluation-harness; compare them by item.

    Results go to evaluations.json in a model's folder, or in evaluations/NAME for a Hub name, with the scores of all
    items beside it, which a later evaluation reuses. Those of a training go into the ledger that has it, too.
    """
    from deltalab.evaluation import evaluate as evaluating
    from deltalab.evaluation.compare import compare
    from deltalab.evaluation.harness import HarnessOptions
    from deltalab.evaluation.items import FOLDER, ItemFiles
    from deltalab.evaluation.model_folder import open_model
    from deltalab.evaluation.results import require_readable
    from deltalab.evaluation.suites.measure import SuiteOptions, measure, require

    if split not in SPLITS:
        raise unknown("split", split, SPLITS, where="--split")
    for model in models:
        if models.count(model) > 1:
            raise InputError(f"{model}: is named {models.count(model)} times; name two models to compare them")
    task_names = [task.strip() for task in (tasks or "").split(",") if task.strip()]
    suite_names = [name.strip() for name in (suite or "").split(",") if name.strip()]
    if lengths and not suite_names:
        raise InputError("--lengths: only suites read it: give --suite")
    if files is not None and not files.is_dir():  # ruler would read its texts elsewhere
        raise InputError(f"--files {files}: no such folder")
    at, how = _numbers(lengths), HarnessOptions(few_shot, batch_size, max_length, files)
    _require_readers(task_names, suite_names, how, include)
    results: dict[str, Sequence[Result]] = {}
    with ExitStack() as stack:  # a model that cannot be opened is found before the first is measured
        folders = {model: stack.enter_context(open_model(model, trusted=trust)) for model in models}
        first = folders[models[0]]
        asked = {}
        for model, folder in folders.items():
            require_readable(_place(model, folder))
            packed_data = evaluating.packed_for(folder, data, first)
            # All models are measured on sequences of the same length, or they would share no item.
            tokens = length or first.length or folder.length
            chosen, left_out = task_names, dict[str, str]()
            if not task_names and not suite_names:
                borrowed = folder is not first or data is None
                chosen, left_out = evaluating.askable(
                    folder, packed_data, split=split, length=tokens, borrowed=borrowed
                )
            else:
                evaluating.require(folder, chosen, packed_data, tokens, include)
            of_suites = SuiteOptions(packed_data, split, tokens, at, limit, how)
            require(folder, suite_names, of_suites)
            asked[model] = packed_data, tokens, chosen, left_out, of_suites
        for model, folder in folders.items():
            packed_data, tokens, chosen, left_out, of_suites = asked[model]
            identity, place = folder.identity, _place(model, folder)
            kept = None if identity is None else ItemFiles(place / FOLDER, identity, folder.step)
            own = evaluating.evaluate(
                folder,
                chosen,
                data=packed_data,
                split=split,
                length=tokens,
                limit=limit,
                include=include,
                options=how,
                kept=kept,
                say=progress.advance,
            )
            by_suite, without, versions = measure(folder, suite_names, of_suites, kept=kept, say=progress.advance)
            results[model], left_out = [*own, *by_suite], left_out | without
            folder.release()
            about: dict[str, Any] = {
                "weights": folder.weights,
                "data": None if packed_data is None else str(packed_data.folder),
            }
            about |= {"suites": versions} if versions else {}
            summary = _record(place, folder, results[model], about, db)
            for task, reason in left_out.items():
                whose = "" if len(models) == 1 else f"{model}: "
                progress.note(f"{whose}left out {task}: {reason}")
            if len(models) > 1:
                progress.note(summary)
        if len(models) > 1:
            found = compare(results)
            for model in models[1:]:
                rows = _rows(found, model, folders[model], first, _place(models[0], first))
                _record(_place(model, folders[model]), folders[model], [], {}, db, rows)
    if len(models) > 1:
        _show(results, found, as_json)
    elif as_json:
        print(json.dumps([result.row() for result in results[models[0]]]))
    else:
        console = Console()
        console.print(_values(results))
        console.print(summary, markup=False, highlight=False, soft_wrap=True)


def _place(model: str, folder: "ModelFolder") -> Path:
    """The folder that keeps the results of a model."""
    if isinstance(folder.path, str):
        return Path("evaluations", model.replace("/", "--"))
    return folder.run or Path(model)


def _record(
    place: Path,
    folder: "ModelFolder",
    results: "Sequence[Result]",
    about: Mapping[str, Any],
    db: str | None,
    comparisons: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Writes results and comparisons beside the model and into the ledger, and says where they are."""
    from deltalab.evaluation.results import write
    from deltalab.store import Store
    from deltalab.store.trainings import add_evaluations, record

    place.mkdir(parents=True, exist_ok=True)
    file = write(results, place, about, comparisons)
    summary = f"{file}: {len(results)} value{'s' * (len(results) != 1)}"
    if folder.training is not None and Store.exists(db):
        with Store.open(db, create=False) as store:
            if folder.run is not None:
                record(store, folder.run)
                return f"{summary}, also in the ledger"
            if add_evaluations(store, folder.training, [result.row() for result in results], comparisons):
                return f"{summary}, also in the ledger"
            return f"{summary}; the ledger has no training {folder.training}: `deltalab db import RUN` records it"
    return summary


def _rows(
    found: "Compared", model: str, folder: "ModelFolder", first: "ModelFolder", place: Path
) -> list[dict[str, Any]]:
    """The comparisons of a model with the first one, as `evaluations.json` and the ledger have them.

    Args:
        found: The comparisons.
        model: The model, as the user named it.
        folder: The folder of the model.
        first: The folder of the model that it is compared with.
        place: The folder that keeps the results of that one.
    """
    from deltalab.evaluation.results import FILE

    reference = {"reference": first.training or str(first.named), "reference_step": first.step}
    reference["reference_file"] = str((place / FILE).resolve())
    return [
        {"step": folder.step, **reference, **{key: value for key, value in asdict(one).items() if key != "model"}}
        for one in found.comparisons
        if one.model == model
    ]


def _show(results: "Mapping[str, Sequence[Result]]", found: "Compared", as_json: bool) -> None:
    """Prints the values of several models, and their differences."""
    first = next(iter(results))
    left_out: list[dict[str, Any]] = [
        {"model": model, "task": task, "metrics": metrics, "reason": reason}
        for (task, model, reason), metrics in found.left_out.items()
    ]
    if as_json:
        report = {
            "results": {model: [result.row() for result in rows] for model, rows in results.items()},
            "reference": first,
            "comparisons": [asdict(one) for one in found.comparisons],
            "not_compared": left_out,
            "partly_compared": found.partly,
            "too_skewed": found.too_skewed,
        }
        print(json.dumps(report))
        return
    names = _short(list(results))
    console = Console()
    console.print(_values({names[model]: rows for model, rows in results.items()}))
    if found.comparisons:
        table = _table("model", "task", "metric", f"difference to {names[first]}", "p", "items", left=3)
        for one in found.comparisons:
            metric = f"ln {one.metric}" if one.is_log else one.metric
            ends = f"{one.difference:+.4f} [{one.low:+.4f}, {one.high:+.4f}]{'*' if one.decided else ' '}"
            table.add_row(names[one.model], one.task, metric, ends, f"{one.p:.2g}", f"{one.items:,}")
        console.print()
        console.print(table)
        count = len(found.comparisons)
        hold = f"All {count} intervals hold together" if count > 1 else "The interval holds"
        console.print(
            f"{hold} with 95%, if items are drawn anew; * leaves out 0.",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip
    lines = [
        f"not compared: {names[row['model']]}: {row['task']} {', '.join(row['metrics'])}: {row['reason']}"
        for row in left_out
    ]
    for line in [*found.partly, *found.too_skewed, *lines]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _short(models: Sequence[str]) -> dict[str, str]:
    """The ends of paths and Hub names, as long as they must be to differ."""
    parts = {model: Path(model).parts for model in models}
    for length in range(1, max(map(len, parts.values()))):
        names = {model: "/".join(path[-length:]) for model, path in parts.items()}
        if len(set(names.values())) == len(models):
            return names
    return {model: model for model in models}


def _values(results: "Mapping[str, Sequence[Result]]") -> Table:
    """A table of the values of models. Those of one model have their examples; several stand side by side."""
    names = list(dict.fromkeys((result.task, result.metric) for rows in results.values() for result in rows))
    if len(results) == 1:
        [rows] = results.values()
        table = _table("task", "metric", "value", "stderr", "examples", left=2)
        for result in rows:
            stderr = "" if result.stderr is None else f"{result.stderr:.4f}"
            examples = "" if result.examples is None else f"{result.examples:,}"
            table.add_row(result.task, result.metric, f"{result.value:.4f}", stderr, examples)
        return table
    table = _table("task", "metric", *results, left=2)
    by_name = [{(result.task, result.metric): result for result in rows} for rows in results.values()]
    for name in names:
        cells = []
        for found in (rows.get(name) for rows in by_name):
            stderr = "" if found is None or found.stderr is None else f" ± {found.stderr:.4f}"
            cells.append("" if found is None else f"{found.value:.4f}{stderr}")
        table.add_row(*name, *cells)
    return table


def _table(*headers: str, left: int) -> Table:
    """A table whose first columns are text, and whose others are figures."""
    table = Table(box=None, pad_edge=False)
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold")
    return table
