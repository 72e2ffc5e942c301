"""Measures whether a model retrieves a number from a long text."""

import torch

from deltalab.data.token_shards import Split
from deltalab.errors import InputError
from deltalab.evaluation.loss import TIMES
from deltalab.evaluation.model_folder import ModelFolder
from deltalab.evaluation.needle_questions import questions
from deltalab.evaluation.results import Result


def needle(folder: ModelFolder, task: str, length: int, examples: int, filler: Split | None) -> list[Result]:
    """Measures retrieval at 1, 2 and 4 times the length of the training.

    Args:
        folder: The folder of the model.
        task: The name of the task in the results.
        length: Tokens of a training sequence.
        examples: Questions of each length.
        filler: The split of packed data that fills the texts; None repeats a few sentences.

    Returns:
        For each length `exact_match`, the share of numbers that greedy decoding gets right, and `accuracy`, the share
        of right tokens of the numbers, each after the correct tokens before it.

    Raises:
        InputError: If even the longest text is too short for a needle and its question.
    """
    results: list[Result] = []
    for times in TIMES:
        right_tokens, tokens, right_numbers, count = 0, 0, 0, 0
        for question in questions(folder.encode, times * length, examples, filler=filler):
            ids = torch.tensor([question.tokens + question.answer[:-1]])
            guesses = folder.logits(ids, keep=len(question.answer))[0].argmax(-1).cpu()
            hits = int((guesses == torch.tensor(question.answer)).sum())
            count, right_tokens, tokens = count + 1, right_tokens + hits, tokens + len(question.answer)
            right_numbers += hits == len(question.answer)
        if count:
            results.append(Result(folder.step, task, f"exact_match@{times * length}", right_numbers / count, count))
            results.append(Result(folder.step, task, f"accuracy@{times * length}", right_tokens / tokens, count))
    if not results:
        raise InputError(f"task '{task}': {no_room(length, filler)}")
    return results


def no_room(length: int, filler: Split | None) -> str:
    """Returns the reason that no question fits."""
    or_else = "" if filler is None else ", or the split is too short to fill them"
    return f"a needle and its question do not fit into {TIMES[-1] * length} tokens{or_else}: give --length"
