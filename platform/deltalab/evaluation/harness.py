"""Finds tasks of lm-evaluation-harness and measures models on them."""

import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from deltalab.errors import InputError, nearest_of
from deltalab.evaluation.items import Items, item_id
from deltalab.evaluation.loss import TIMES
from deltalab.evaluation.model_folder import ModelFolder
from deltalab.evaluation.results import OWN, Result, fingerprint
from deltalab.evaluation.suites.datasets import copy_of

NAME = re.compile(r"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([^\s"'#\[\]]+)""", re.MULTILINE)
"""The name of a task, group or tag in a YAML file of the harness."""

BOOTSTRAP = 100
"""Resamples for the standard error of a metric that has no formula for it, such as perplexity: it is then known to 7%,
and for 10,000 examples takes 0.1 s. With 0 the harness gives no standard error, not even that of a mean."""

MEANS = ("mean", "nanmean", "perplexity", "weighted_perplexity", "bits_per_byte")
"""The harness's aggregations that are means of items, or functions of sums over them."""


@dataclass(frozen=True)
class HarnessOptions:
    """How lm-evaluation-harness runs.

    Attributes:
        few_shot: The solved examples before each question; None for the task's own number.
        batch_size: The questions that are answered together; None for 8 on a GPU and 1 on a CPU.
        max_length: The most tokens of a question; None for four times the training's length, or the model's own number
            if it has no recipe.
        files: The folder with copies of data sets, each in its subfolder ORG/NAME; None reads the Hub.
    """

    few_shot: int | None = None
    batch_size: int | None = None
    max_length: int | None = None
    files: Path | None = None


def find_tasks(tasks: Sequence[str], include: Path | None) -> tuple[list[str], list[Path]]:
    """Finds tasks of lm-evaluation-harness.

    Its index takes 20 s of a core, and is asked only for names that stand in its files without being defined there.

    Args:
        tasks: Names and YAML files of tasks.
        include: A folder with YAML files of further tasks.

    Returns:
        The names of the tasks, and the folders with YAML files of further tasks.

    Raises:
        InputError: If the package lm_eval is missing, if a file or a folder cannot be read, or if the harness
            has no task of a name.
    """
    if not tasks:
        return [], []
    installed = find_spec("lm_eval")
    if installed is None:
        raise InputError(
            f"tasks {', '.join(tasks)} need lm-evaluation-harness: pip install 'deltalab[eval]'; ours are "
            f"{', '.join(OWN)}"
        )
    files = [Path(task).resolve() for task in tasks if task.endswith((".yaml", ".yml"))]
    names = [task_named(task) for task in tasks]
    if include is not None and not include.is_dir():
        raise InputError(f"{include}: no such folder of tasks")
    folders = [*dict.fromkeys([*([] if include is None else [include.resolve()]), *(file.parent for file in files)])]
    of_harness = [Path(location) / "tasks" for location in installed.submodule_search_locations or ()]
    known, unseen = set[str](), {task: re.compile(rf"(?<![\w-]){re.escape(task)}(?![\w-])") for task in names}
    # Files that others include end in `_yaml`.
    for file in (file for folder in (*folders, *of_harness) for file in folder.rglob("*yaml") if file.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        known.update(NAME.findall(text))
        unseen = {task: word for task, word in unseen.items() if not word.search(text)}
        if known.issuperset(names):
            return names, folders
    if not unseen:  # The index also knows names of lists of tags, and those that code makes.
        known.update(index_of_tasks(folders).all_tasks)
    for name in (*unseen, *names):
        if name not in known:
            raise _unknown(name, sorted(known))
    return names, folders


def index_of_tasks(folders: Sequence[Path]) -> Any:
    """The harness's index of tasks, which takes seconds. It is made anew if a file in a folder of tasks has changed."""
    files = sorted((str(file), file.stat().st_mtime_ns) for folder in folders for file in folder.rglob("*.y*ml"))
    return _index_of(tuple(map(str, folders)), tuple(files))


@lru_cache(maxsize=1)
def _index_of(folders: tuple[str, ...], files: tuple[tuple[str, int], ...]) -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(folders) or None)


def harness(
    folder: ModelFolder,
    names: Sequence[str],
    folders: Sequence[Path],
    *,
    limit: int | None,
    options: HarnessOptions = HarnessOptions(),
) -> Iterator[tuple[str, list[Result]]]:
    """Measures a model on tasks of lm-evaluation-harness, one after the other.

    Args:
        folder: The folder of the model.
        names: The names of the tasks.
        folders: Folders with YAML files of further tasks.
        limit: Examples of each task; None means all.
        options: How the harness runs.

    Yields:
        Each name with a result for each metric of the task or, of a group, of all its tasks.

    Raises:
        InputError: If the folder has no tokenizer, if a task does not exist, or if its data cannot be loaded.

    References:
        Gao et al. 2024, lm-evaluation-harness.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    manager = index_of_tasks(folders)
    for task in names:
        if task not in manager.all_tasks:
            raise _unknown(task, manager.all_tasks)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else each bootstrap forks a process for every core
    model = HFLM(
        pretrained=folder.model,
        tokenizer=folder.tokenizer,
        batch_size=options.batch_size or (8 if folder.device.type == "cuda" else 1),
        max_length=options.max_length or _own_length(folder),
        device=str(folder.device),
    )
    for name in names:
        try:
            # The harness prints, and stdout may be JSON.
            with redirect_stdout(sys.stderr), _local(manager, [name], options.files) as given:
                report: Any = simple_evaluate(
                    model, tasks=given, limit=limit, task_manager=manager, log_samples=True,
                    bootstrap_iters=BOOTSTRAP, num_fewshot=options.few_shot,
                )  # fmt: skip
        except InputError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            if folder.tokenizer.eos_token_id is None:  # the harness passes None where it stops and where it begins
                reason += f"; the tokenizer of {folder.named} names no end-of-text token, which it may need"
            raise InputError(f"lm-evaluation-harness: {type(error).__name__}: {reason}") from error
        yield name, _results(folder, report)


def _own_length(folder: ModelFolder) -> int | None:
    """The most tokens of a question unless the user says otherwise; None for the number of the model's positions."""
    return folder.length and TIMES[-1] * folder.length


def asked_length(folder: ModelFolder, options: HarnessOptions) -> int | None:
    """Returns the most tokens of a question that the user asks for; None if the model has this number by itself."""
    return None if options.max_length == _own_length(folder) else options.max_length


def asked_of(options: HarnessOptions, limit: int | None, folders: Sequence[Path], length: int | None) -> dict[str, Any]:
    """Returns what results of the harness depend on besides the model.

    Args:
        options: How the harness runs.
        limit: Examples of each task; None means all.
        folders: Folders with YAML files of further tasks. Their files count, and the files that they name.
        length: Tokens of a training sequence; None if it is not known.
    """
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in (".yaml", ".yml", ".py")]
    named = {
        Path(word)
        for file in files
        for word in re.findall(r"[^\s\"'{}\[\],]*/[^\s\"'{}\[\],]+", file.read_text(encoding="utf-8", errors="replace"))
    }
    known = [*files, *(file for file in named if file.is_file())]
    return {
        "limit": limit,
        "few_shot": options.few_shot,
        "max_length": options.max_length,
        **({} if options.files is None else {"files": str(options.files.resolve())}),
        "lm_eval": version("lm_eval"),
        "definitions": fingerprint(known) if known else "",
        "length": length,
    }


def _results(folder: ModelFolder, report: Mapping[str, Any]) -> list[Result]:
    """The results of a report of the harness."""
    results = []
    for task, metrics in report["results"].items():
        count = report.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in metrics.items():
            metric, _, kind = key.partition(",")
            if not isinstance(value, int | float) or not kind or metric.endswith("_stderr"):
                continue
            stderr = metrics.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            error_bar = float(stderr) if isinstance(stderr, int | float) and math.isfinite(stderr) else None
            items = _items(report, task, metric, kind, float(value))
            results.append(Result(folder.step, task, name, float(value), count, error_bar, items))
    return results


def _items(report: Mapping[str, Any], task: str, metric: str, kind: str, value: float) -> Items | None:
    """The items of a metric, or of a group's metric; None if it is neither a mean of them nor a function of sums."""
    samples = report.get("samples", {})
    parts = [
        [sample for sample in samples[part] if sample["filter"] == kind and metric in sample]
        for part in _leaves(report, task)
        if part in samples
    ]
    how = {_aggregation(report, part, metric) for part in _leaves(report, task)}
    if not any(parts) or how - {None, *MEANS}:
        return None
    flat = [sample for part in parts for sample in part]
    ids = [item_id(sample["doc_hash"], sample["prompt_hash"]) for sample in flat]
    scores: list[Any] = [sample[metric] for sample in flat]
    forms: list[Items] = []
    if all(isinstance(score, int | float) for score in scores):
        totals = list(map(float, scores))
        forms.append(Items.mean(ids, totals))
        forms.append(Items(ids, [-total for total in totals], [1.0] * len(ids), is_log=True))
        each = [1 / len(part) for part in parts for _ in part]  # a group's mean over tasks, not over items
        forms.append(Items(ids, [total * weight for total, weight in zip(totals, each, strict=True)], each))
    elif all(isinstance(score, list | tuple) and len(score) == 2 and score[1] > 0 for score in scores):
        nats, weights = [-float(score[0]) for score in scores], [float(score[1]) for score in scores]
        forms.append(Items(ids, nats, weights, is_log=True))
        forms.append(Items(ids, [part / math.log(2) for part in nats], weights))
    # Which of the forms a metric has, its value tells.
    return next((form for form in forms if math.isclose(form.value, value, rel_tol=1e-6, abs_tol=1e-9)), None)


def _leaves(report: Mapping[str, Any], task: str) -> list[str]:
    """The tasks of a group and of its groups; the task itself if it is none."""
    children = report.get("group_subtasks", {}).get(task) or []
    return [leaf for child in children for leaf in _leaves(report, child)] if children else [task]


def _aggregation(report: Mapping[str, Any], task: str, metric: str) -> str | None:
    """How a task's configuration says that a metric is made of items; None if it says nothing."""
    for entry in report.get("configs", {}).get(task, {}).get("metric_list") or []:
        if entry.get("metric") == metric and isinstance(entry.get("aggregation"), str):
            return str(entry["aggregation"])
    return None


@contextmanager
def _local(manager: Any, names: Sequence[str], files: Path | None) -> Iterator[list[str]]:
    """The names of tasks or, if data sets come from a folder, YAML files that name the copies in place of the Hub."""
    if files is None:
        yield list(names)
        return
    with TemporaryDirectory() as temporary:
        written = []
        for name in names:
            source = manager.task_index[name].yaml_path
            copy = copy_of(_dataset_of(source, name), files)
            file = Path(temporary, f"{name}.yaml")
            file.write_text(
                f"include: {json.dumps(str(source))}\ntask: {name}\ndataset_path: {json.dumps(str(copy))}\n"
            )
            written.append(str(file))
        yield written


def _dataset_of(file: Path | None, task: str) -> str:
    """The data set of a task, which its YAML file names or one that it includes."""
    while file is not None:
        text = file.read_text(encoding="utf-8")
        if dataset := re.search(r"^dataset_path:[ \t]*(\S+)", text, re.MULTILINE):
            return dataset[1].strip("\"'")
        included = re.search(r"^include:[ \t]*(\S+)", text, re.MULTILINE)
        file = file.parent / included[1].strip("\"'") if included else None
    raise InputError(f"--files: task '{task}' names no data set; of a group, name its tasks")


def task_named(task: str) -> str:
    """Returns the name by which results call a task that the user gives by its name or by its YAML file.

    Raises:
        InputError: If the file cannot be read, or names no task.
    """
    return _task_of(Path(task)) if task.endswith((".yaml", ".yml")) else task


def _task_of(file: Path) -> str:
    """The name of the task in one of the harness's YAML files, whose tags only the harness can read."""
    try:
        match = re.search(r"^(?:task|group):\s*(\S+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if match is None:
        raise InputError(f"{file}: names no task: it has no line 'task: NAME'")
    return match[1].strip("\"'")


def _unknown(task: str, known: Sequence[str]) -> InputError:
    """The error for a task that does not exist, with the nearest name among those that are known."""
    near = nearest_of(task, [*OWN, *known])
    suggestion = "" if near is None else f" did you mean '{near}'?"
    problem = f"unknown task '{task}';{suggestion} ours are {', '.join(OWN)}; `lm-eval ls tasks` lists the harness's"
    return InputError(problem, key=task, kind="unknown").with_fields(nearest=near)  # The harness has 10,000 tasks.
