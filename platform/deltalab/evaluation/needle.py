"""Measures whether a model retrieves numbers from a long text."""

from itertools import groupby

import torch

from deltalab.data.token_shards import Split
from deltalab.errors import InputError
from deltalab.evaluation.items import Items, item_id, of_items
from deltalab.evaluation.loss import TIMES, TOKENS_AT_ONCE
from deltalab.evaluation.model_folder import ModelFolder
from deltalab.evaluation.needle_questions import KINDS, Encoder, Question, questions
from deltalab.evaluation.results import Result, titled


def needle(folder: ModelFolder, task: str, length: int, examples: int, filler: Split | None) -> list[Result]:
    """Measures retrieval at 1, 2 and 4 times the length of the training, by greedy decoding.

    Args:
        folder: The folder of the model.
        task: The name of the task, one of `KINDS`.
        length: Tokens of a training sequence.
        examples: Questions of each length.
        filler: The split of packed data that fills the texts; None repeats a few sentences.

    Returns:
        For each length `exact_match`, the share of numbers all of whose digits are right. The items are the questions.

    Raises:
        InputError: If even the longest text is too short for the needles and their question.
    """
    results: list[Result] = []
    for times in TIMES:
        asked = list(questions(folder.encode, times * length, examples, KINDS[task], filler=filler))
        scores = [question.score(answer) for question, answer in zip(asked, _answers(folder, asked), strict=True)]
        if asked:
            ids = [item_id(folder.tokenizer.decode(question.tokens)) for question in asked]
            metric = f"exact_match@{times * length}"
            results.append(of_items(folder.step, titled(task), metric, Items.mean(ids, scores)))
    if not results:
        raise InputError(f"task '{task}': {no_room(length, filler)}")
    return results


def metric_names(encode: Encoder, task: str, length: int, filler: Split | None) -> list[str]:
    """Returns the names of the metrics that `needle` measures: one for each length that a question fits into."""
    return [
        f"exact_match@{times * length}"
        for times in TIMES
        if any(True for _ in questions(encode, times * length, 1, KINDS[task], filler=filler))
    ]


def no_room(length: int, filler: Split | None) -> str:
    """Returns the reason that no question fits."""
    or_else = "" if filler is None else ", or the split is too short to fill them"
    return (
        f"the needles and their question do not fit into {TIMES[-1] * length} tokens{or_else}: give a longer --length"
    )


def _answers(folder: ModelFolder, asked: list[Question]) -> list[str]:
    """What the model answers to each question. Questions of equally many tokens are answered together."""
    answers = [""] * len(asked)

    def size(i: int) -> tuple[int, int]:
        return len(asked[i].tokens), asked[i].room

    for (length, room), places in groupby(sorted(range(len(asked)), key=size), key=size):
        equal, at_once = list(places), max(1, TOKENS_AT_ONCE // (length + room))
        for some in (equal[begin : begin + at_once] for begin in range(0, len(equal), at_once)):
            tokens = folder.continued(torch.tensor([asked[i].tokens for i in some]), room)
            for i, answer in zip(some, tokens.tolist(), strict=True):
                answers[i] = folder.tokenizer.decode(answer, skip_special_tokens=True)
    return answers
