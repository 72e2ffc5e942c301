"""Whether a model finds one number in a long text."""

import torch

from deltalab.data.token_shards import Split
from deltalab.errors import InputError
from deltalab.evaluation.folder import Folder
from deltalab.evaluation.loss import TIMES
from deltalab.evaluation.needle_questions import questions
from deltalab.evaluation.results import Result


def needle(folder: Folder, task: str, length: int, examples: int, filler: Split | None) -> list[Result]:
    """`exact_match`, the share of numbers that greedy decoding gets right, and `accuracy`, the share of their tokens
    that are right after the right ones before; at 1, 2 and 4 times the training's length.

    Raises `InputError` where even the longest text is too short for a needle and its question.
    """
    results: list[Result] = []
    for times in TIMES:
        right, tokens, whole, asked = 0, 0, 0, 0
        for question in questions(folder.encode, times * length, examples, filler=filler):
            ids = torch.tensor([question.tokens + question.answer[:-1]])
            guessed = folder.logits(ids, keep=len(question.answer))[0].argmax(-1).cpu()
            hits = int((guessed == torch.tensor(question.answer)).sum())
            asked, right, tokens = asked + 1, right + hits, tokens + len(question.answer)
            whole += hits == len(question.answer)
        if asked:
            results.append(Result(folder.step, task, f"exact_match@{times * length}", whole / asked, asked))
            results.append(Result(folder.step, task, f"accuracy@{times * length}", right / tokens, asked))
    if not results:
        raise InputError(f"task '{task}': {no_room(length, filler)}")
    return results


def no_room(length: int, filler: Split | None) -> str:
    or_else = "" if filler is None else ", or the split is too short to fill them"
    return f"a needle and its question do not fit into {TIMES[-1] * length} tokens{or_else}: give --length"
