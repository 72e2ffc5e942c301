"""Runs evaluation tasks on a folder of a trained model, and tells which tasks a folder's model can do."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltalab.data.text_tokenizers import load_tokenizer, same_ids
from deltalab.data.token_shards import META, Packed
from deltalab.errors import InputError
from deltalab.evaluation.harness import HarnessOptions, asked_length, asked_of, find_tasks, harness
from deltalab.evaluation.items import ItemFiles
from deltalab.evaluation.loss import loss, too_short
from deltalab.evaluation.model_folder import NO_TOKENIZER, ModelFolder
from deltalab.evaluation.needle import metric_names, needle, no_room
from deltalab.evaluation.needle_questions import KINDS
from deltalab.evaluation.proxy import proxy, proxy_task
from deltalab.evaluation.results import OWN, Result, fingerprint, named_data, titled

LIMIT = 64
"""How many examples each of our tasks has at each length, unless the user gives another number."""

NEED_DATA = ("loss", "needle_text")
NEED_LENGTH = ("loss", *KINDS)

NO_DATA = "it needs packed data: give --data PACKED"
NO_LENGTH = "no recipe says how long a training sequence is: give --length"


def evaluate(
    folder: ModelFolder,
    tasks: Sequence[str],
    *,
    data: Packed | None = None,
    split: str = "validation",
    length: int | None = None,
    limit: int | None = None,
    include: Path | None = None,
    options: HarnessOptions = HarnessOptions(),  # noqa: B008
    kept: ItemFiles | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Result]:
    """Measures a model on tasks.

    `loss` needs packed data; needles need a tokenizer; `needle_text` needs both; `proxy` needs a folder that was
    exported from a study and that still has the vocabulary of the study's task. A task whose items are kept already is
    not measured again.

    Args:
        folder: The folder of the model.
        tasks: Names of our tasks, and names or YAML files of tasks of lm-evaluation-harness.
        data: Packed data; None if no task needs packed data.
        split: The split of the packed data.
        length: Tokens of a training sequence; None means those of the folder's recipe.
        limit: Examples of each task; None means `LIMIT` for our tasks, and all for those of the harness.
        include: A folder with YAML files of further tasks of the harness.
        options: How the harness runs.
        kept: The files of items; None keeps none.
        say: Is called with a line before each task.

    Raises:
        InputError: If a task does not exist, or lacks something that it needs.
    """
    others, folders = require(folder, tasks, data, length, include)
    length = length or folder.length
    examples, results = limit or LIMIT, dict[str, list[Result]]()
    of_data = None if data is None else {"data": fingerprint([data.folder / META]), "split": split}
    about: dict[str, dict[str, Any]] = {}
    for task in dict.fromkeys(tasks):
        if task in NEED_LENGTH:
            about[task] = {"task": titled(task), "length": length, "limit": examples}
            about[task] |= (of_data or {}) if task in NEED_DATA else {}
        elif task == "proxy":
            about[task] = _trial_of(folder)
    if others:
        about |= dict.fromkeys(others, asked_of(options, limit, folders, length))
    for task, facts in about.items():
        found = None if kept is None else kept.find(task, facts)
        if kept is not None and found is not None:
            say(f"{folder.named}: {task}: reuses the items of {kept.file(task, facts)}")
            results[task] = found

    def keep(task: str, measured: list[Result]) -> None:
        results[task] = measured
        if kept is not None:
            kept.keep(task, about[task], measured)

    for task in (task for task in about if task in OWN and task not in results):
        say(f"{folder.named}: {task}")
        if task == "proxy":
            keep(task, proxy(folder))
        elif task == "loss" and data is not None:
            keep(task, loss(folder, data.split(split), task, length or 0, examples, data.tokenizer["sha256"]))
        else:
            filler = data.split(split) if data is not None and task == "needle_text" else None
            keep(task, needle(folder, task, length or 0, examples, filler))
    if left := [task for task in others if task not in results]:
        say(f"{folder.named}: {', '.join(left)}")
        for task, measured in harness(folder, left, folders, limit=limit, options=options):
            keep(task, measured)
    return [
        replace(result, **_setting(folder, task, data, split, limit, options))
        for task in about
        for result in results[task]
    ]


def _setting(
    folder: ModelFolder, task: str, data: Packed | None, split: str, limit: int | None, options: HarnessOptions
) -> dict[str, Any]:
    """How a task was asked, as `Setting` has it. The arguments are those of `evaluate`."""
    if task not in OWN:
        return {"limit": limit, "few_shot": options.few_shot, "max_length": asked_length(folder, options)}
    setting: dict[str, Any] = {} if task == "proxy" or limit == LIMIT else {"limit": limit}
    if data is not None and task in NEED_DATA:
        setting |= {"split": split, "other_data": other_data(folder, data)}
    return setting


def other_data(folder: ModelFolder, data: Packed) -> str | None:
    """Returns the name of packed data that the model was not trained on, or not as far as is known; else None."""
    return None if data.meta["sha256"] == folder.data_hash else named_data(data)


def require(
    folder: ModelFolder, tasks: Sequence[str], data: Packed | None, length: int | None, include: Path | None
) -> tuple[list[str], list[Path]]:
    """Checks without measuring that a model has what tasks need. The arguments are those of `evaluate`.

    Returns:
        The tasks of lm-evaluation-harness, and the folders with YAML files of further tasks, as `find_tasks` does.

    Raises:
        InputError: If a task does not exist, or lacks something that it needs.
    """
    if data is not None and any(task in NEED_DATA for task in tasks) and (reason := _other_tokenizer(folder, data)):
        raise InputError(reason)
    found = find_tasks([task for task in tasks if task not in OWN], include)
    if length is None and folder.length is None and any(task in NEED_LENGTH for task in tasks):
        raise InputError(f"{folder.named}: {NO_LENGTH}")
    for task in tasks:
        if task in NEED_DATA and data is None:
            raise InputError(f"task '{task}': {NO_DATA}")
        if task == "proxy" and isinstance(why_not := proxy_task(folder), str):
            raise InputError(f"task 'proxy': {folder.named}: {why_not}")
    if not folder.has_tokenizer and (found[0] or any(task in KINDS for task in tasks)):
        raise InputError(f"{folder.named}: has no tokenizer: {NO_TOKENIZER}")
    return found


def _trial_of(folder: ModelFolder) -> dict[str, Any]:
    """What results on a folder's proxy task depend on besides its weights."""
    task = proxy_task(folder)
    if isinstance(task, str):
        raise InputError(f"task 'proxy': {folder.named}: {task}")
    trial = json.loads(json.dumps({name: folder.recipe["trial"][name] for name in ("task", "train")}, default=str))
    return {**trial, "version": task.version, "data": task.fingerprint()}


def askable(
    folder: ModelFolder,
    data: Packed | None,
    *,
    split: str = "validation",
    length: int | None = None,
    borrowed: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """Determines which of our tasks a folder can be asked.

    Args:
        folder: The folder of the model.
        data: Packed data; None if there are none.
        split: The split of the packed data.
        length: Tokens of a training sequence; None means those of the folder's recipe.
        borrowed: Whether the data are those of another model's training, which this one need not be able to read.

    Returns:
        The names of the tasks that can be asked, and by name the reason that each other task cannot be asked.

    Raises:
        InputError: If no task can be asked.
    """
    length = length or folder.length
    tokenizer = folder.has_tokenizer
    texts = None if data is None else data.split(split)
    why_not: dict[str, str] = {}
    foreign = _other_tokenizer(folder, data) if data is not None and borrowed else None
    if length is None:
        why_not = dict.fromkeys(NEED_LENGTH, NO_LENGTH)
    else:
        if texts is None:
            why_not["loss"] = NO_DATA
        elif foreign:
            why_not["loss"] = foreign
        elif not texts.rows(length):
            why_not["loss"] = too_short(texts, length)
        for task in KINDS:
            filler = texts if task == "needle_text" else None
            if not tokenizer:
                why_not[task] = f"the folder has no tokenizer: {NO_TOKENIZER}"
            elif task == "needle_text" and texts is None:
                why_not[task] = NO_DATA
            elif task == "needle_text" and foreign:
                why_not[task] = foreign
            elif not metric_names(folder.encode, task, length, filler):
                why_not[task] = no_room(length, filler)
    if isinstance(reason := proxy_task(folder), str):
        why_not["proxy"] = reason
    if len(why_not) == len(OWN):
        reasons = "; ".join(f"{task}: {text}" for task, text in why_not.items())
        raise InputError(f"{folder.named}: none of our tasks can be asked of it: {reasons}")
    return [task for task in OWN if task not in why_not], why_not


def packed(folder: Path) -> Packed:
    """Opens packed data that a user names.

    Raises:
        InputError: If the folder holds no packed data.
    """
    try:
        return Packed(folder)
    except ValueError as error:
        raise InputError(str(error)) from None


def packed_for(folder: ModelFolder, given: Path | None, first: ModelFolder) -> Packed | None:
    """Opens the packed data for a model, among several of which one is the first.

    Without data that the user names, a model has those of the first model's training, so that both meet the same
    rows. A model of another tokenizer cannot read them, and has those of its own training.

    Raises:
        InputError: If the user names a folder that holds no packed data.
    """
    if given is not None or first.data is None or folder is first:
        found = given or folder.data
        return None if found is None else packed(found)
    data = packed(first.data)
    if folder.data is None:
        return data
    own = packed(folder.data)
    same = own.tokenizer["sha256"] == data.tokenizer["sha256"] or same_ids(str(own.folder), str(data.folder))
    return data if same else own


def _other_tokenizer(folder: ModelFolder, data: Packed) -> str | None:
    """Says why a model cannot read data: another tokenizer packed them, or they have more tokens. None if it can."""
    tokenizer = folder.recipe.get("tokenizer")
    if folder.foreign:
        # The recipe of an export says which tokenizer its model has; of another model, only its file does.
        tokenizer = load_tokenizer(str(folder.path))[1]
    if (
        isinstance(tokenizer, Mapping)
        and tokenizer.get("sha256") not in (None, data.tokenizer["sha256"])
        and not same_ids(str(folder.path), str(data.folder))
    ):
        return (
            f"{data.folder}: is packed with another tokenizer, '{data.tokenizer['name']}' of "
            f"{data.tokenizer['vocab_size']} ids, than {folder.named}: "
            f"'{tokenizer.get('name', tokenizer.get('kind'))}' of {tokenizer.get('vocab_size')}"
        )
    if data.tokenizer["vocab_size"] > folder.vocab_size:
        return (
            f"{data.folder}: has {data.tokenizer['vocab_size']} token ids, and the model of {folder.named} "
            f"{folder.vocab_size}"
        )
    return None
