"""Generates the texts of RULER at any length, and scores answers to them.

Hsieh et al. 2024 (arXiv:2404.06654); https://github.com/NVIDIA/RULER has the authors' code. Prompts, counts and scores
are theirs. The words are not, and essays may be replaced by other text.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from deltalab.data.token_shards import Split
from deltalab.errors import InputError
from deltalab.evaluation.suites.datasets import essays, json_file
from deltalab.evaluation.suites.ruler_needles import Needles
from deltalab.evaluation.suites.ruler_words import (
    CommonWords,
    Documents,
    FrequentWords,
    Variables,
    hotpot_documents,
    squad_documents,
)

READERS = {"dev-v2.0.json": squad_documents, "hotpot_dev_distractor_v1.json": hotpot_documents}
"""By file, how its documents and questions are read."""

ANSWER_TOKENS = {
    "needles": Needles.answer_tokens,
    "variables": Variables.answer_tokens,
    "common_words": CommonWords.answer_tokens,
    "frequent_words": FrequentWords.answer_tokens,
    "documents": Documents.answer_tokens,
}
"""By kind of text, the most tokens of an answer."""

EXAMPLE_TOKENS = 500
"""The most tokens of the solved example of a chain of variables. It also has at most a quarter of the length."""


class Texts(Protocol):
    """A kind of text.

    Attributes:
        answer_tokens: The tokens that are kept for the answer, and the most that are generated.
    """

    @property
    def answer_tokens(self) -> int: ...

    def text(self, draw: random.Random, size: int, index: int) -> tuple[str, list[str]]:
        """Returns a prompt and its answers.

        Args:
            draw: The source of random numbers. A draw of the same seed gives the same answers at every size.
            size: How much stands around what is asked; 0 is the least.
            index: The number of the example.
        """


@dataclass(frozen=True)
class Question:
    """A prompt, and what should stand in the answer.

    Attributes:
        prompt: The prompt.
        answers: Texts.
        tokens: The tokens of the prompt.
    """

    prompt: str
    answers: tuple[str, ...]
    tokens: int


class Coder(Protocol):
    """A tokenizer, as the folder of a model has it.

    Attributes:
        tokenizer: Returns the ids of a text as `input_ids`, with the special tokens that stand before a text.
    """

    @property
    def tokenizer(self) -> Callable[[str], Mapping[str, Any]]: ...

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids."""


@dataclass(frozen=True)
class Sources:
    """What the texts are made from.

    Attributes:
        folder: The folder of the model, whose tokenizer measures lengths.
        files: The folder with files; None if there is none.
        split: The split of packed data; None if there are none.
        longest: The tokens of the longest text.
    """

    folder: Coder
    files: Path | None
    split: Split | None
    longest: int

    def tokens(self, text: str) -> int:
        """Returns the number of tokens of a text."""
        return len(self.folder.tokenizer(text)["input_ids"])

    @cached_property
    def words(self) -> list[str]:
        """The words of the haystacks that are neither noise nor needles.

        Raises:
            InputError: If there is neither a folder of essays nor packed data.
        """
        if self._with_essays is not None:
            return essays(self._with_essays).split()
        if self.split is None:
            raise InputError("it needs a haystack: give --files DIR with a folder essays, or --data PACKED")
        ids = self.split.read(0, min(self.split.tokens, self.longest))
        return self.folder.decode(ids.tolist()).split()

    @property
    def _with_essays(self) -> Path | None:
        """The folder with files, if essays are among them."""
        return self.files if self.files is not None and (self.files / "essays").is_dir() else None

    def fills(self, settings: Mapping[str, Any]) -> bool:
        """Returns whether the split of packed data fills the texts of a task with these settings."""
        return settings.get("haystack") == "essays" and self._with_essays is None

    def texts(self, settings: Mapping[str, Any], needs: Sequence[str], length: int) -> Texts:
        """Returns the kind of text that a task of the suite names.

        Args:
            settings: The task's settings in the suite.
            needs: What the task needs.
            length: The tokens of a text.

        Raises:
            InputError: If a file or a haystack is missing.
        """
        kind = settings["texts"]
        rest = {key: value for key, value in settings.items() if key != "texts"}
        if kind == "needles":
            return Needles(words=self.words if rest["haystack"] == "essays" else (), **rest)
        if kind == "variables":
            return self._variables(length=length, **rest)
        if kind == "common_words":
            return CommonWords(length)
        if kind == "frequent_words":
            return FrequentWords(length)
        (file,) = needs
        documents = documents_of(file, self.files)
        if documents is None:
            raise InputError(f"it needs {file}: give --files DIR with it")
        if documents.count == 0:
            raise InputError(f"{file} holds no question")
        return documents

    def _variables(self, hops: int, length: int) -> Variables:
        most, lines = min(EXAMPLE_TOKENS, length // 4), hops + 1
        draw = random.Random(0)
        while self.tokens(Variables(hops, lines + 1).example(draw)) <= most:
            lines += 1
        return Variables(hops, lines)


def documents_of(name: str, files: Path | None) -> Documents | None:
    """Returns the documents and questions of a file of `READERS`; None if the folder of files does not hold it.

    Raises:
        InputError: If the file is no JSON, or not of its form.
    """
    content = json_file(name, files)
    if files is None or content is None:
        return None
    try:
        return READERS[name](content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{files / name}: does not have the form of the {name} that its authors give: {reason}"
        ) from None


def require_files(needs: Sequence[str], files: Path | None) -> None:
    """Checks that what a folder of files holds for a task can be read; it may lack what the task needs.

    Args:
        needs: What the task needs.
        files: The folder; None if there is none.

    Raises:
        InputError: If a file cannot be read.
    """
    for name in needs:
        if name in READERS:
            documents_of(name, files)
        elif files is not None and (files / name).is_dir():
            essays(files)


def questions(
    task: str, texts: Texts, length: int, count: int, tokens: Callable[[str], int], seed: int = 0
) -> Iterator[Question]:
    """Yields questions, each as long as it can be. The same arguments give the same questions.

    A question that does not fit at its shortest is left out.

    Args:
        task: The name of the task, from which its random numbers are drawn.
        texts: The kind of text.
        length: The most tokens of a prompt and its answer together.
        count: The number of questions.
        tokens: Counts the tokens of a text.
        seed: Another seed gives other questions.
    """
    room = length - texts.answer_tokens
    guess = 0
    for index in range(min(count, getattr(texts, "count", count))):
        made = partial(_question, f"{seed}/{task}/{length}/{index}", texts, index, tokens)
        longest = _longest(made, room, guess, getattr(texts, "most", None))
        if longest is not None:
            guess, question = longest
            yield question


def fits(task: str, texts: Texts, length: int, count: int, tokens: Callable[[str], int], seed: int = 0) -> bool:
    """Determines whether `questions` yields a question of these arguments, without making it as long as it can be."""
    room = length - texts.answer_tokens
    return any(
        _question(f"{seed}/{task}/{length}/{index}", texts, index, tokens, 0).tokens <= room
        for index in range(min(count, getattr(texts, "count", count)))
    )


def too_short(
    task: str, texts_of: Callable[[int], Texts], length: int, count: int, tokens: Callable[[str], int]
) -> str | None:
    """Says why no question fits into a length; None if one does. The arguments are those of `fits`, `least_length`."""
    if fits(task, texts_of(length), length, count, tokens):
        return None
    least = least_length(task, texts_of, length, tokens)
    return f"its shortest text does not fit into {length} tokens, but into {least}: --lengths {least}"


def least_length(task: str, texts_of: Callable[[int], Texts], length: int, tokens: Callable[[str], int]) -> int:
    """Returns the fewest tokens above `length` into which the first question fits.

    The text of a task may depend on the length that it is for, so lengths are tried.

    Args:
        task: The name of the task.
        texts_of: Makes the kind of text for a length.
        length: A length that no question fits into.
        tokens: Counts the tokens of a text.
    """

    def enough(length: int) -> bool:
        return fits(task, texts_of(length), length, 1, tokens)

    low, high = length, 2 * length
    while not enough(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def match(question: Question, continuation: str) -> float:
    """Returns the share of the answers that stand in the continuation, in whatever case."""
    return sum(answer.lower() in continuation.lower() for answer in question.answers) / len(question.answers)


def match_any(question: Question, continuation: str) -> float:
    """Returns 1.0 if one of the answers stands in the continuation, in whatever case, else 0.0."""
    return float(match(question, continuation) > 0)


def _question(seed: str, texts: Texts, index: int, tokens: Callable[[str], int], size: int) -> Question:
    """The question of an index, with so much around what is asked; a seed gives the same answers at every size."""
    prompt, answers = texts.text(random.Random(seed), size, index)
    return Question(prompt, tuple(answers), tokens(prompt))


def _longest(made: Callable[[int], Question], room: int, guess: int, most: int | None) -> tuple[int, Question] | None:
    """The largest size whose question fits, with the question; None if none fits.

    Args:
        made: Makes the question of a size.
        room: The most tokens of a prompt.
        guess: A size near the answer.
        most: The largest size; None if there is no largest.
    """
    best: tuple[int, Question] | None = None
    fits, too_large = -1, math.inf if most is None else most + 1
    size, step = guess, max(1, guess // 64)
    while too_large - fits > 1:
        question = made(size)
        if question.tokens <= room:
            fits, best = size, (size, question)
        else:
            too_large = size
        if fits >= 0 and too_large < math.inf:
            size = int(fits + too_large) // 2
        else:  # the steps away from the guess double
            size, step = (size + step if fits >= 0 else max(0, size - step)), 2 * step
    return best
