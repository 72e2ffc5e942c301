"""Finds tasks of lm-evaluation-harness and measures models on them."""

import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deltalab.errors import InputError
from deltalab.evaluation.loss import TIMES
from deltalab.evaluation.model_folder import ModelFolder
from deltalab.evaluation.results import OWN, Result

NAME = re.compile(r"""^["']?(?:task|group|tag)["']?:[ \t]*["']?([^\s"'#\[\]]+)""", re.MULTILINE)
"""The name of a task, group or tag in a YAML file of the harness."""

BOOTSTRAP = 100
"""Resamples for the standard error of a metric that has no formula for it, such as perplexity: it is then known to 7%,
and for 10,000 examples takes 0.1 s. With 0 the harness gives no standard error, not even that of a mean."""


@dataclass(frozen=True)
class HarnessOptions:
    """How lm-evaluation-harness runs.

    Attributes:
        few_shot: The solved examples before each question; None for the task's own number.
        batch_size: The questions that are answered together; None for 8 on a GPU and 1 on a CPU.
        max_length: The most tokens of a question; None for four times the training's length, or the model's own number
            if it has no recipe.
    """

    few_shot: int | None = None
    batch_size: int | None = None
    max_length: int | None = None


def find_tasks(tasks: Sequence[str], include: Path | None) -> tuple[list[str], list[Path]]:
    """Finds tasks of lm-evaluation-harness without its index, which takes 20 s of a core; this search takes 1 s.

    Args:
        tasks: Names and YAML files of tasks.
        include: A folder with YAML files of further tasks.

    Returns:
        The names of the tasks, and the folders with YAML files of further tasks.

    Raises:
        InputError: If the package lm_eval is missing, if a file or a folder cannot be read, or if a name stands in none
            of the harness's files.
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
    names = [task for task in tasks if not task.endswith((".yaml", ".yml"))] + [_task_of(file) for file in files]
    if include is not None and not include.is_dir():
        raise InputError(f"{include}: no such folder of tasks")
    folders = [*dict.fromkeys([*([] if include is None else [include.resolve()]), *(file.parent for file in files)])]
    of_harness = [Path(location) / "tasks" for location in installed.submodule_search_locations or ()]
    known, missing = set[str](), {task: re.compile(rf"(?<![\w-]){re.escape(task)}(?![\w-])") for task in names}
    for file in (file for folder in (*folders, *of_harness) for file in folder.rglob("*.yaml")):
        text = file.read_text(encoding="utf-8", errors="replace")
        known.update(NAME.findall(text))
        missing = {task: word for task, word in missing.items() if not word.search(text)}
        if not missing:
            return names, folders
    raise _unknown(next(iter(missing)), sorted(known))


def harness(
    folder: ModelFolder,
    names: Sequence[str],
    folders: Sequence[Path],
    *,
    limit: int | None,
    options: HarnessOptions = HarnessOptions(),
) -> list[Result]:
    """Measures a model on tasks of lm-evaluation-harness.

    Args:
        folder: The folder of the model.
        names: The names of the tasks.
        folders: Folders with YAML files of further tasks.
        limit: Examples of each task; None means all.
        options: How the harness runs.

    Returns:
        A result for each metric of each task.

    Raises:
        InputError: If the folder has no tokenizer, if a task does not exist, or if its data cannot be loaded.

    References:
        Gao et al. 2024, lm-evaluation-harness.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=list(map(str, folders)) or None)
    for task in names:
        if task not in manager.all_tasks:
            raise _unknown(task, manager.all_tasks)
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # else each bootstrap forks a process for every core
    model = HFLM(
        pretrained=folder.model,
        tokenizer=folder.tokenizer,
        batch_size=options.batch_size or (8 if folder.device.type == "cuda" else 1),
        max_length=options.max_length or (folder.length and TIMES[-1] * folder.length),
        device=str(folder.device),
    )
    try:
        with redirect_stdout(sys.stderr):  # the harness prints, and stdout may be JSON
            report: Any = simple_evaluate(
                model, tasks=names, limit=limit, task_manager=manager, log_samples=False,
                bootstrap_iters=BOOTSTRAP, num_fewshot=options.few_shot,
            )  # fmt: skip
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"lm-evaluation-harness: {type(error).__name__}: {reason}") from error
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
            results.append(Result(folder.step, task, name, float(value), count, error_bar))
    return results


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
    near = get_close_matches(task, [*OWN, *known], n=1)
    suggestion = f" did you mean '{near[0]}'?" if near else ""
    return InputError(
        f"unknown task '{task}';{suggestion} ours are {', '.join(OWN)}; `lm-eval ls tasks` lists the harness's"
    )
