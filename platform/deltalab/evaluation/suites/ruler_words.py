"""Texts of RULER without needles: chains of variables, lists of words, coded text, and documents with a question."""

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

from deltalab.evaluation.suites.ruler_needles import NOISE
from deltalab.evaluation.suites.words import different_words

LONG = 4096
"""From this length on, a list of common words repeats them more often."""


@dataclass(frozen=True)
class Variables:
    """A chain of assignments among noise, after a short solved example.

    Attributes:
        hops: The assignments of a variable to a variable.
        example_lines: The lines of noise in the example.
    """

    hops: int
    example_lines: int
    answer_tokens: ClassVar[int] = 30

    def text(self, draw: random.Random, size: int, index: int) -> tuple[str, list[str]]:
        """Returns a prompt and the names of the variables that have the value that it asks for."""
        example = self.example(draw)
        prompt, answers = self._question(draw, self.hops + 1 + size, letters=5)
        return f"{example}\n\n{prompt}", answers

    def example(self, draw: random.Random) -> str:
        """Returns the solved example."""
        prompt, names = self._question(draw, self.example_lines, letters=3)
        return prompt + " ".join(names)

    def _question(self, draw: random.Random, lines: int, letters: int) -> tuple[str, list[str]]:
        names: dict[str, None] = {}
        while len(names) <= self.hops:
            names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
        variables, value = [*names], draw.randrange(10_000, 100_000)
        chain = [f"VAR {variables[0]} = {value}"]
        chain += [f"VAR {after} = VAR {before} " for before, after in pairwise(variables)]
        context = [NOISE] * lines
        for done, place in enumerate(sorted(draw.sample(range(lines), len(chain)))):
            context.insert(place + done, chain[done])
        text = "\n".join(context)
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{text}\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: "
            "According to the chain(s) of variable assignment in the text above, "
            f"{len(chain)} variables are assigned the value {value}, they are: "
        ), variables


@dataclass(frozen=True)
class CommonWords:
    """A numbered list in which ten words are more common than the others, after a solved example.

    Attributes:
        length: The tokens of the text, by which the words repeat.
    """

    length: int
    answer_tokens: ClassVar[int] = 120
    COMMON: ClassVar[int] = 10

    def text(self, draw: random.Random, size: int, index: int) -> tuple[str, list[str]]:
        """Returns a prompt and the common words."""
        long = self.length >= LONG
        example, words = self._question(draw, *((40, 10, 3) if long else (20, 3, 1)))
        solved = " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))
        prompt, answers = self._question(draw, self.COMMON + 1 + size, *((30, 3) if long else (6, 1)))
        return f"{example} {solved}\n{prompt}", answers

    def _question(self, draw: random.Random, count: int, common: int, rare: int) -> tuple[str, list[str]]:
        words = different_words(draw, count)
        answers = words[: self.COMMON]
        listed = answers * common + words[self.COMMON :] * rare
        draw.shuffle(listed)
        context = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list? "
            "Answer: The top 10 words that appear most often in the list are:"
        ), answers


@dataclass(frozen=True)
class FrequentWords:
    """Words without a meaning, as often as a zeta distribution says. The most frequent of them is three dots.

    Attributes:
        length: The tokens of the text, a fiftieth of which is the number of words that are told apart.
    """

    length: int
    answer_tokens: ClassVar[int] = 50
    ALPHA: ClassVar[float] = 2.0
    AT_LEAST: ClassVar[int] = 80
    """The fewest words: with fewer, the third word to find may be as frequent as one that is not."""

    def text(self, draw: random.Random, size: int, index: int) -> tuple[str, list[str]]:
        """Returns a prompt and the three most frequent words."""
        words: dict[str, None] = {"...": None}
        while len(words) < max(5, self.length // 50):
            words["".join(draw.choices(string.ascii_lowercase, k=6))] = None
        zeta = math.pi**2 / 6
        count = self.AT_LEAST + size
        listed = [word for rank, word in enumerate(words, 1) for _ in range(int(count * rank**-self.ALPHA / zeta))]
        draw.shuffle(listed)
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {' '.join(listed)}\nQuestion: Do not provide any explanation. Please ignore the "
            "dots '....'. What are the three most frequently appeared words in the above coded text? Answer: According "
            "to the coded text above, the three most frequently appeared words are:"
        ), [*words][1:4]


@dataclass(frozen=True)
class Asked:
    """A question about documents.

    Attributes:
        question: The question.
        answers: Its answers, one of which suffices.
        documents: The documents that answer it.
        near: Further documents about the same matter, which come before others.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    near: tuple[str, ...] = ()


@dataclass(frozen=True)
class Documents:
    """Questions about documents, among documents that do not answer them.

    Attributes:
        asked: The questions.
        documents: All documents.
    """

    asked: Sequence[Asked]
    documents: Sequence[str]
    answer_tokens: ClassVar[int] = 32

    @property
    def count(self) -> int:
        """The number of questions."""
        return len(self.asked)

    @property
    def most(self) -> int:
        """The documents that a text can have beyond those that answer its question."""
        return len(self.documents)

    def text(self, draw: random.Random, size: int, index: int) -> tuple[str, list[str]]:
        """Returns a prompt and the answers to its question."""
        one = self.asked[index]
        near = draw.sample(one.near, len(one.near))
        held = {*one.documents, *near}
        others = [text for text in self.documents if text not in held]
        draw.shuffle(others)
        shown = [*one.documents, *[*near, *others][:size]]
        draw.shuffle(shown)
        context = "\n\n".join(f"Document {i}:\n{text}" for i, text in enumerate(shown, 1))
        order = (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            "words."
        )
        return (
            f"{order}\n\nThe following are given documents.\n\n{context}\n\n{order}\n\nQuestion: {one.question} Answer:"
        ), list(one.answers)


def squad_documents(content: Any) -> Documents:
    """Reads the questions of SQuAD's `dev-v2.0.json` that have an answer."""
    asked = []
    for article in content["data"]:
        texts = list(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        asked += [
            Asked(
                question["question"],
                tuple(answer["text"] for answer in question["answers"]),
                (paragraph["context"],),
                tuple(text for text in texts if text != paragraph["context"]),
            )
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
            if not question["is_impossible"]
        ]
    return Documents(asked, sorted({text for one in asked for text in (*one.documents, *one.near)}))


def hotpot_documents(content: Any) -> Documents:
    """Reads the questions of HotpotQA's `hotpot_dev_distractor_v1.json`, each with its ten paragraphs."""
    asked = [
        Asked(
            one["question"],
            (one["answer"],),
            tuple(f"{title}\n{''.join(sentences)}" for title, sentences in one["context"]),
        )
        for one in content
    ]
    return Documents(asked, sorted({text for one in asked for text in one.documents}))
