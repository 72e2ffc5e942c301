"""Runs evaluation tasks on a folder of a trained model, and tells which tasks a folder's model can do."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from deltalab.data.text_tokenizers import load_tokenizer
from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation.harness import HarnessOptions, find_tasks, harness
from deltalab.evaluation.loss import TIMES, loss, too_short
from deltalab.evaluation.model_folder import NO_TOKENIZER, ModelFolder
from deltalab.evaluation.needle import needle, no_room
from deltalab.evaluation.needle_questions import questions
from deltalab.evaluation.proxy import proxy, proxy_task
from deltalab.evaluation.results import OWN, Result

LIMIT = 64
"""How many examples each of our tasks has at each length, unless the user gives another number."""

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
) -> list[Result]:
    """Measures a model on tasks.

    `loss` needs packed data; `needle` needs a tokenizer; `needle_text` needs both; `proxy` needs a folder that was
    exported from a study and that still has the vocabulary of the study's task.

    Args:
        folder: The folder of the model.
        tasks: Names of our tasks, and names or YAML files of tasks of lm-evaluation-harness.
        data: Packed data; None if no task needs packed data.
        split: The split of the packed data.
        length: Tokens of a training sequence; None means those of the folder's recipe.
        limit: Examples of each task; None means `LIMIT` for our tasks, and all for those of the harness.
        include: A folder with YAML files of further tasks of the harness.
        options: How the harness runs.

    Raises:
        InputError: If a task does not exist, or lacks something that it needs.
    """
    if data is not None:
        _require_same_tokenizer(folder, data)
    length = length or folder.length
    results: list[Result] = []
    others, folders = find_tasks([task for task in tasks if task not in OWN], include)
    needs_length = [task for task in tasks if task in ("loss", "needle", "needle_text")]
    if needs_length and length is None:
        raise InputError(f"{folder.named}: {NO_LENGTH}")
    for task in tasks:
        if task in ("loss", "needle_text") and data is None:
            raise InputError(f"task '{task}': {NO_DATA}")
        examples = limit or LIMIT
        if task == "loss" and data is not None:
            results += loss(folder, data.split(split), f"{task}", length or 0, examples)
        elif task == "needle":
            results += needle(folder, task, length or 0, examples, None)
        elif task == "needle_text" and data is not None:
            results += needle(folder, task, length or 0, examples, data.split(split))
        elif task == "proxy":
            results += proxy(folder)
    if others:
        results += harness(folder, others, folders, limit=limit, options=options)
    return results


def askable(
    folder: ModelFolder, data: Packed | None, *, split: str = "validation", length: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Determines which of our tasks a folder can be asked.

    Args:
        folder: The folder of the model.
        data: Packed data; None if there are none.
        split: The split of the packed data.
        length: Tokens of a training sequence; None means those of the folder's recipe.

    Returns:
        The names of the tasks that can be asked, and by name the reason that each other task cannot be asked.

    Raises:
        InputError: If no task can be asked.
    """
    length = length or folder.length
    tokenizer = folder.has_tokenizer
    texts = None if data is None else data.split(split)
    why_not: dict[str, str] = {}
    if length is None:
        why_not = dict.fromkeys(("loss", "needle", "needle_text"), NO_LENGTH)
    else:
        if texts is None:
            why_not["loss"] = NO_DATA
        elif not texts.rows(length):
            why_not["loss"] = too_short(texts, length)
        for task, filler in (("needle", None), ("needle_text", texts)):
            if not tokenizer:
                why_not[task] = f"the folder has no tokenizer: {NO_TOKENIZER}"
            elif task == "needle_text" and texts is None:
                why_not[task] = NO_DATA
            elif not any(q for times in TIMES for q in questions(folder.encode, times * length, 1, filler=filler)):
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


def _require_same_tokenizer(folder: ModelFolder, data: Packed) -> None:
    """Raises `InputError` if the data were packed with another tokenizer, or have more tokens than the model."""
    tokenizer = folder.recipe.get("tokenizer")
    if folder.foreign:
        # The recipe of an export says which tokenizer its model has; of another model, only its file does.
        tokenizer = load_tokenizer(str(folder.path))[1]
    if isinstance(tokenizer, Mapping) and tokenizer.get("sha256") not in (None, data.tokenizer["sha256"]):
        raise InputError(
            f"{data.folder}: is packed with another tokenizer, '{data.tokenizer['name']}' of "
            f"{data.tokenizer['vocab_size']} ids, than {folder.named}: "
            f"'{tokenizer.get('name', tokenizer.get('kind'))}' of {tokenizer.get('vocab_size')}"
        )
    if data.tokenizer["vocab_size"] > folder.vocab_size:
        raise InputError(
            f"{data.folder}: has {data.tokenizer['vocab_size']} token ids, and the model of {folder.named} "
            f"{folder.vocab_size}"
        )
