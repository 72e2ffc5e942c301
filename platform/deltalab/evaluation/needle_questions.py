"""Questions about needles in a haystack, for language models of text.

A text of a given number of tokens holds sentences `NEEDLE` at random places. It ends with the question and the start of
its answer. These are the four kinds of RULER (Hsieh et al. 2024, arXiv:2404.06654): S-NIAH, MK-NIAH, MV-NIAH, MQ-NIAH.
"""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltalab.data.token_shards import Split

PERIOD = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = " One of the special magic numbers for {key} is: {value}. "
ONE = (
    " What is the special magic number for {keys} mentioned in the provided text? The special magic number for {keys} "
    "mentioned in the provided text is"
)
SEVERAL = (
    " What are all the special magic numbers for {keys} mentioned in the provided text? The special magic numbers for "
    "{keys} mentioned in the provided text are"
)
KEYS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "gravel", "harbor", "ivory", "juniper", "kelp", "lagoon")
DIGITS = 7


class Encoder(Protocol):
    """A tokenizer, from text to ids without special tokens."""

    def __call__(self, text: str) -> list[int]:
        """Returns the ids of a text."""


@dataclass(frozen=True)
class Needles:
    """What a text holds, and what is asked of it.

    Attributes:
        keys: The words that have numbers.
        values: The numbers of each of them.
        queries: How many of the words a question asks for, each with all its numbers.
    """

    keys: int = 1
    values: int = 1
    queries: int = 1


KINDS = {
    "needle": Needles(),
    "needle_multikey": Needles(keys=4),
    "needle_multivalue": Needles(values=4),
    "needle_multiquery": Needles(keys=4, queries=4),
    "needle_text": Needles(),
}
"""The needles of each task. Keys, values and queries number four as in RULER."""


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        tokens: The haystack with its needles, and the question.
        values: The numbers that are asked for.
        room: The tokens that an answer may take: twice those of a plain list of the numbers.
    """

    tokens: list[int]
    values: tuple[str, ...]
    room: int

    def score(self, answer: str) -> float:
        """Returns the share of the numbers that an answer has. Only as many numbers as are asked for are read.

        Examples:
            >>> question = Question([], ("1234567", "7654321"), 40)
            >>> question.score(" 7654321 and 1234567."), question.score(" 1, 1234567, 7654321"), question.score(" none")
            (1.0, 0.5, 0.0)
        """
        found = re.findall(r"\d+", answer)[: len(self.values)]
        return len(set(found) & set(self.values)) / len(self.values)


def questions(
    encode: Encoder, length: int, count: int, needles: Needles, *, filler: Split | None = None, seed: int = 0
) -> Iterator[Question]:
    """Yields questions. The same arguments give the same questions.

    The places of the needles among the tokens of the haystack are uniform.

    Args:
        encode: The tokenizer.
        length: Tokens of a question and the room for its answer. If no question fits into so few tokens, none is
            yielded.
        count: The number of questions.
        needles: What a text holds.
        filler: The split of packed data from which haystacks are cut at random places; None repeats `PERIOD`.
        seed: Another seed gives other questions.
    """
    draw = random.Random(f"{seed}/{length}")
    for _ in range(count):
        keys = draw.sample(KEYS, needles.keys)
        numbers = [str(n).zfill(DIGITS) for n in draw.sample(range(10**DIGITS), needles.keys * needles.values)]
        held = [(key, number) for key, number in zip(keys * needles.values, numbers, strict=True)]
        asked = draw.sample(keys, needles.queries)
        values = tuple(number for key in asked for of, number in held if of == key)
        draw.shuffle(held)
        sentences = [encode(NEEDLE.format(key=key, value=number)) for key, number in held]
        question = encode((ONE if len(values) == 1 else SEVERAL).format(keys=_listed(asked)))
        answer_room = 2 * len(encode(f" {_listed(values)}"))
        room = length - sum(map(len, sentences)) - len(question) - answer_room
        if room < 1 or (filler is not None and filler.tokens < room):
            return
        haystack = _haystack(encode, room, filler, draw)
        tokens, begin = list[int](), 0
        for place, sentence in zip(sorted(draw.choices(range(room + 1), k=len(held))), sentences, strict=True):
            tokens += [*haystack[begin:place], *sentence]
            begin = place
        yield Question([*tokens, *haystack[begin:], *question], values, answer_room)


def _listed(words: Sequence[str]) -> str:
    """The words as a list in a sentence."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])}, and {words[-1]}"


def _haystack(encode: Encoder, room: int, filler: Split | None, draw: random.Random) -> list[int]:
    """The tokens around the needles."""
    if filler is not None:
        window: NDArray[np.int64] = filler.read(draw.randint(0, filler.tokens - room), room)
        return [int(token) for token in window]
    period = encode(PERIOD)
    return (period * (room // len(period) + 1))[:room]
