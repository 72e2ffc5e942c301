"""Measures a model on suites of tasks."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deltalab.data.token_shards import Packed
from deltalab.errors import InputError, NotInstalled
from deltalab.evaluation import evaluate as evaluating
from deltalab.evaluation.harness import HarnessOptions, asked_length, asked_of, find_tasks, harness
from deltalab.evaluation.items import ItemFiles, Items, item_id, of_items
from deltalab.evaluation.model_folder import NO_TOKENIZER, ModelFolder
from deltalab.evaluation.results import Result, fingerprint
from deltalab.evaluation.suites import recall, ruler
from deltalab.evaluation.suites.datasets import copy_of, rows
from deltalab.evaluation.suites.greedy import Progress, continuations
from deltalab.evaluation.suites.suite import Suite, SuiteTask, chosen, lengths_of

SCORES = {"match": ruler.match, "match_any": ruler.match_any}
"""By metric, how an answer to a question of RULER is scored."""


@dataclass(frozen=True)
class SuiteOptions:
    """How suites are asked.

    Attributes:
        data: Packed data; None if there are none.
        split: The split of the packed data.
        length: Tokens of a training sequence; None means those of the folder's recipe.
        lengths: The lengths in tokens of texts; empty means those of the suite.
        limit: Examples of each task; None means those of the suite.
        harness: How lm-evaluation-harness runs. Its batch size holds for our tasks, too, and so do its files.
    """

    data: Packed | None = None
    split: str = "validation"
    length: int | None = None
    lengths: Sequence[int] = ()
    limit: int | None = None
    harness: HarnessOptions = HarnessOptions()  # noqa: RUF009


def measure(
    folder: ModelFolder,
    names: Iterable[str],
    options: SuiteOptions,
    *,
    kept: ItemFiles | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[Result], dict[str, str], dict[str, int]]:
    """Measures a model on suites. A task whose items are kept already is not measured again.

    Args:
        folder: The folder of the model.
        names: `SUITE` for a suite with its mean, or `SUITE/TASK` for one of its tasks.
        options: How suites are asked.
        kept: The files of items; None keeps none.
        say: Is called with a line for each file that is reused.

    Returns:
        A result for each task, metric and length and, for a whole suite, the mean; by task, why it was left out; and by
        suite, its version.

    Raises:
        InputError: If a suite does not exist, or lacks something that it needs.
    """
    suites = require(folder, names, options)
    lengths = {suite.name: lengths_of(suite, options.lengths) for suite, _ in suites}
    results: list[Result] = []
    left_out: dict[str, str] = {}
    once = _Once(folder, kept, say)
    for suite, tasks in suites:
        if suite.asked_by == "harness":
            found = _by_harness(folder, suite, tasks, options, once)
        elif suite.asked_by == "deltalab":
            found = evaluating.evaluate(
                folder,
                [task.name for task in tasks],
                data=options.data,
                split=options.split,
                length=options.length,
                limit=options.limit,
                kept=kept,
                say=say,
            )
        elif suite.asked_by == "recall":
            found = _recall(folder, suite, tasks, lengths[suite.name], options, once)
        else:
            found, reasons = _ruler(folder, suite, tasks, lengths[suite.name], options, once)
            left_out |= reasons
        if suite.asked_by != "deltalab":
            limit = None if options.limit == suite.examples else options.limit
            most = asked_length(folder, options.harness) if suite.asked_by == "harness" else None
            found = [replace(result, limit=limit, max_length=most) for result in found]
        results += found
        if tasks == suite.tasks:
            results += means(suite, found, lengths[suite.name])
    return results, left_out, {suite.name: suite.version for suite, _ in suites}


def require(
    folder: ModelFolder, names: Iterable[str], options: SuiteOptions
) -> list[tuple[Suite, tuple[SuiteTask, ...]]]:
    """Checks without measuring that a model can be asked suites. The arguments are those of `measure`.

    Returns:
        The suites, each with those of its tasks that are asked.

    Raises:
        InputError: If a suite does not exist, or lacks something that it needs.
    """
    suites = chosen(names)
    if options.harness.few_shot is not None and any(suite.few_shot is not None for suite, _ in suites):
        raise InputError("--few-shot: a suite has its own number of solved examples")
    for suite, tasks in suites:
        lengths = lengths_of(suite, options.lengths)
        ours = [task.name for task in tasks] if suite.asked_by == "deltalab" else []
        evaluating.require(folder, ours, options.data, options.length, None)
        if suite.asked_by == "harness":
            find_tasks([task.name for task in tasks], None)
        if suite.asked_by != "deltalab" and not folder.has_tokenizer:
            raise InputError(f"{folder.named}: has no tokenizer: {NO_TOKENIZER}")
        require_data(suite, tasks, lengths, options.harness.files)
    return suites


def require_data(suite: Suite, tasks: Iterable[SuiteTask], lengths: Sequence[int], files: Path | None) -> None:
    """Checks what a suite needs of any model: packages, copies of data sets, and room for an answer.

    Args:
        suite: The suite.
        tasks: Those of its tasks that are asked.
        lengths: The lengths in tokens of texts.
        files: The folder of copies; None if data sets come from the Hub.

    Raises:
        InputError: If one of them is missing.
    """
    if missing := [name for name in suite.packages if find_spec(name) is None]:
        raise NotInstalled(f"suite {suite.name}: needs {', '.join(missing)}", "'deltalab[eval]'")
    for task in tasks:
        if suite.asked_by == "harness":
            copy_of(task.needs[0], files)
        elif suite.asked_by == "ruler":
            ruler.require_files(task.needs, files)
        elif suite.asked_by == "recall":
            for length in lengths:
                recall.require_room(length)
                copy_of(_recalled(task, length), files)


def means(suite: Suite, results: Sequence[Result], lengths: Sequence[int]) -> list[Result]:
    """Returns the unweighted mean over a suite's tasks, at each length.

    Its number of examples is that of the tasks. If some of the tasks were left out, its metric says how many were not.

    Args:
        suite: The suite.
        results: The results of its tasks.
        lengths: The lengths; empty if the suite has no lengths.
    """
    quoted = [task for task in suite.tasks if task.metric is not None]
    found: list[Result] = []
    for at in [f"@{length}" for length in lengths] or [""]:
        wanted = {(task_title(suite, task), f"{task.metric}{at}") for task in quoted}
        parts = [result for result in results if (result.task, result.metric) in wanted]
        if not parts:
            continue
        name = "mean" if len(parts) == len(quoted) else f"mean_of_{len(parts)}"
        value = sum(part.value for part in parts) / len(parts)
        errors = [part.stderr for part in parts if part.stderr is not None]
        stderr = math.hypot(*errors) / len(parts) if len(errors) == len(parts) else None
        asked = next((part for part in parts if part.split), parts[0])  # only some of a suite's tasks read packed data
        found.append(
            replace(
                asked, task=suite.name, metric=name + at, value=value, examples=len(parts), stderr=stderr, items=None
            )
        )
    return found


def task_title(suite: Suite, task: SuiteTask) -> str:
    """Returns the name of a task in results. The suite is left out if the harness or deltalab names the task itself."""
    return task.name if suite.asked_by in ("harness", "deltalab") else f"{suite.name}/{task.name}"


@dataclass(frozen=True)
class _Once:
    """Measures what no file of items has, and keeps it.

    Attributes:
        folder: The folder of the model.
        kept: The files of items; None keeps none.
        say: Is called with a line for each file that is reused.
    """

    folder: ModelFolder
    kept: ItemFiles | None
    say: Callable[[str], None]

    def __call__(self, task: str, about: Mapping[str, Any], measured: Callable[[], list[Result]]) -> list[Result]:
        """Returns the results of a task, which depend on the model and on what `about` holds."""
        if self.kept is None:
            return measured()
        found = self.kept.find(task, about)
        if found is None:
            found = measured()
            self.kept.keep(task, about, found)
        else:
            self.say(f"{self.folder.named}: {task}: reuses the items of {self.kept.file(task, about)}")
        return found


def _by_harness(
    folder: ModelFolder, suite: Suite, tasks: Sequence[SuiteTask], options: SuiteOptions, once: _Once
) -> list[Result]:
    names, folders = find_tasks([task.name for task in tasks], None)
    how = replace(options.harness, few_shot=suite.few_shot)
    about = asked_of(how, options.limit, folders, options.length or folder.length)

    def measured(name: str) -> list[Result]:
        ((_, found),) = harness(folder, [name], folders, limit=options.limit, options=how)
        return found

    found = {
        (result.task, result.metric): result for name in names for result in once(name, about, partial(measured, name))
    }
    return [found[task.name, metric] for task in tasks for metric in (task.metric, *task.also) if metric is not None]


def _recall(
    folder: ModelFolder,
    suite: Suite,
    tasks: Sequence[SuiteTask],
    lengths: Sequence[int],
    options: SuiteOptions,
    once: _Once,
) -> list[Result]:
    files = options.harness.files

    def measured(task: SuiteTask, length: int) -> list[Result]:
        name, label = _recalled(task, length), f"{suite.name}/{task.name}"
        every = recall.prompts(
            rows(name, "validation", files), task.settings["form"], folder, length, twice=suite.twice, where=name
        )
        asked = [prompt for prompt, _ in zip(every, range(options.limit), strict=False)] if options.limit else [*every]
        written = continuations(
            folder, [prompt.text for prompt in asked], recall.TOKENS,
            label=f"{label}@{length}", stop="\n", batch_size=options.harness.batch_size,
        )  # fmt: skip
        scores = [recall.contains(prompt, text) for prompt, text in zip(asked, written, strict=True)]
        return [_result(folder, label, f"{task.metric}@{length}", [prompt.text for prompt in asked], scores)]

    results = []
    for task in tasks:
        for length in lengths:
            copy = copy_of(_recalled(task, length), files)
            about: dict[str, Any] = {"version": suite.version, "length": length, "limit": options.limit}
            about |= {} if copy is None else {"data": fingerprint(_files_of(copy))}
            results += once(f"{suite.name}/{task.name}", about, partial(measured, task, length))
    return results


def _recalled(task: SuiteTask, length: int) -> str:
    """The data set that a task of recall reads at a length."""
    sizes = task.settings.get("by_length", ())
    return task.needs[next((i for i, size in enumerate(sizes) if size >= length), -1)]


def _ruler(
    folder: ModelFolder,
    suite: Suite,
    tasks: Sequence[SuiteTask],
    lengths: Sequence[int],
    options: SuiteOptions,
    once: _Once,
) -> tuple[list[Result], dict[str, str]]:
    split = None if options.data is None else options.data.split(options.split)
    sources = ruler.Sources(folder, options.harness.files, split, max(lengths))
    count = options.limit or suite.examples or 0
    results, left_out = list[Result](), dict[str, str]()

    def measured(task: SuiteTask, texts: ruler.Texts, length: int) -> list[Result]:
        label, asked = f"{suite.name}/{task.name}", list[ruler.Question]()
        progress = Progress(f"{label}@{length}: texts", count)
        for question in ruler.questions(task.name, texts, length, count, sources.tokens):
            asked.append(question)
            progress(len(asked))
        written = continuations(
            folder, [question.prompt for question in asked], texts.answer_tokens,
            label=f"{label}@{length}", batch_size=options.harness.batch_size,
        )  # fmt: skip
        score = SCORES[str(task.metric)]
        scores = [score(question, text) for question, text in zip(asked, written, strict=True)]
        return [_result(folder, label, f"{task.metric}@{length}", [question.prompt for question in asked], scores)]

    for task in tasks:
        label = f"{suite.name}/{task.name}"
        texts_of = partial(sources.texts, task.settings, task.needs)
        files = options.harness.files
        read = [] if files is None else [file for name in task.needs for file in _files_of(files / name)]
        about: dict[str, Any] = {"version": suite.version, "limit": count, "files": fingerprint(read)}
        filled: dict[str, Any] = {}
        if options.data is not None and sources.fills(task.settings):
            filled = {"split": options.split, "other_data": evaluating.other_data(folder, options.data)}
            about |= {"data": options.data.meta["sha256"], "split": options.split, "longest": max(lengths)}
        for length in lengths:
            try:
                texts = texts_of(length)
            except InputError as error:
                left_out[label] = str(error)
                break
            if reason := ruler.too_short(task.name, texts_of, length, count, sources.tokens):
                left_out[f"{label}@{length}"] = reason
                continue
            found = once(label, {**about, "length": length}, partial(measured, task, texts, length))
            results += [replace(result, **filled) for result in found]
    if not results:
        raise InputError("; ".join(f"{task}: {reason}" for task, reason in left_out.items()))
    return results, left_out


def _files_of(path: Path) -> list[Path]:
    """The files of a folder, or the file itself; none if there is neither."""
    return [file for file in (path, *path.rglob("*")) if file.is_file()]


def _result(folder: ModelFolder, task: str, metric: str, prompts: Sequence[str], scores: Sequence[float]) -> Result:
    """The mean of the scores of a task's examples, with its standard error. The items are the prompts."""
    if not scores:
        raise InputError(f"task '{task}': its data hold no example")
    return of_items(folder.step, task, metric, Items.mean(list(map(item_id, prompts)), list(map(float, scores))))
