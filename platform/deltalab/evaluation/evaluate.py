"""Measures a trained folder: its loss on packed data by length and position, retrieval from a long text, the proxy task
that it comes from, and tasks of lm-evaluation-harness."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation.folder import NO_TOKENIZER, Folder, read_config
from deltalab.evaluation.harness import find_tasks, harness
from deltalab.evaluation.loss import TIMES, loss, too_short
from deltalab.evaluation.needle import needle, no_room
from deltalab.evaluation.needle_questions import questions
from deltalab.evaluation.proxy import proxy, proxy_task
from deltalab.evaluation.results import OWN, Result

LIMIT = 64
"""Examples of each of our tasks and lengths, unless a user asks for others."""

NO_DATA = "it needs packed data: give --data PACKED"
NO_LENGTH = "no recipe says how long a training sequence is: give --length"


def evaluate(
    folder: Folder,
    tasks: Sequence[str],
    *,
    data: Packed | None = None,
    split: str = "validation",
    length: int | None = None,
    limit: int | None = None,
    include: Path | None = None,
) -> list[Result]:
    """Measures the tasks.

    `loss` needs packed data; `needle` a tokenizer; `needle_text` both; `proxy` a folder that was exported from a study
    and whose vocabulary is still the task's. Other names are tasks of lm-evaluation-harness, or its YAML files. length:
    tokens of a training sequence; by default, what the folder's recipe says. limit: examples of each task. include: a
    folder with YAML files of further tasks.

    Raises `InputError` for a task that there is not, and for one that lacks what it needs.
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
        results += harness(folder, others, folders, limit=limit)
    return results


def askable(
    folder: Folder, data: Packed | None, *, split: str = "validation", length: int | None = None
) -> tuple[list[str], dict[str, str]]:
    """Our tasks that a folder can be asked, and why not for each of the others.

    Raises `InputError` where there is none.
    """
    length = length or folder.length
    tokenizer = (folder.path / "tokenizer.json").is_file()
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
    if isinstance(found := proxy_task(folder), str):
        why_not["proxy"] = found
    if len(why_not) == len(OWN):
        reasons = "; ".join(f"{task}: {reason}" for task, reason in why_not.items())
        raise InputError(f"{folder.named}: none of our tasks can be asked of it: {reasons}")
    return [task for task in OWN if task not in why_not], why_not


def packed(folder: Path) -> Packed:
    """Packed data that a user names. Raises `InputError` where it is none."""
    try:
        return Packed(folder)
    except ValueError as error:
        raise InputError(str(error)) from None


def _require_same_tokenizer(folder: Folder, data: Packed) -> None:
    own = folder.recipe.get("tokenizer")
    if isinstance(own, Mapping) and own.get("sha256") not in (None, data.tokenizer["sha256"]):
        raise InputError(
            f"{data.folder}: is packed with another tokenizer, '{data.tokenizer['name']}' of "
            f"{data.tokenizer['vocab_size']} ids, than {folder.named}: '{own.get('name', own.get('kind'))}' of "
            f"{own.get('vocab_size')}"
        )
    if data.tokenizer["vocab_size"] > int(read_config(folder.path)["vocab_size"]):
        raise InputError(
            f"{data.folder}: has {data.tokenizer['vocab_size']} token ids, and the model of {folder.named} "
            f"{read_config(folder.path)['vocab_size']}"
        )
