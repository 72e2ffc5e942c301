"""Questions about a single needle in a haystack, for language models of text.

A text of a given number of tokens holds the sentence `NEEDLE` at a random place. It ends with the question and the
start of its answer, up to the number. This is the task `niah` in words, and S-NIAH of RULER (Hsieh et al. 2024,
arXiv:2404.06654).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deltalab.data.token_shards import Split

PERIOD = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = " One of the special magic numbers for {key} is: {value}. "
QUESTION = (
    " What is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is"
)
KEYS = ("amber", "birch", "cobalt", "dune", "ember", "fjord", "gravel", "harbor", "ivory", "juniper", "kelp", "lagoon")
DIGITS = 7


class Encoder(Protocol):
    """A tokenizer, from text to ids without special tokens."""

    def __call__(self, text: str) -> list[int]:
        """Returns the ids of a text."""


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        tokens: The haystack with its needle, and the question.
        answer: The tokens of the number.
    """

    tokens: list[int]
    answer: list[int]


def questions(
    encode: Encoder, length: int, count: int, *, filler: Split | None = None, seed: int = 0
) -> Iterator[Question]:
    """Yields questions. The same arguments give the same questions.

    The place of the needle among the tokens of the haystack is uniform.

    Args:
        encode: The tokenizer.
        length: Tokens of a question, answer included. If no question fits into so few tokens, none is yielded.
        count: The number of questions.
        filler: The split of packed data from which haystacks are cut at random places; None repeats `PERIOD`.
        seed: Another seed gives other questions.
    """
    draw = random.Random(f"{seed}/{length}")
    for _ in range(count):
        key, value = draw.choice(KEYS), "".join(draw.choice("0123456789") for _ in range(DIGITS))
        needle, question = encode(NEEDLE.format(key=key, value=value)), encode(QUESTION.format(key=key))
        answer = encode(f" {value}")
        room = length - len(needle) - len(question) - len(answer)
        if room < 1 or (filler is not None and filler.tokens < room):
            return
        haystack = _haystack(encode, room, filler, draw)
        place = draw.randint(0, room)
        yield Question([*haystack[:place], *needle, *haystack[place:], *question], answer)


def _haystack(encode: Encoder, room: int, filler: Split | None, draw: random.Random) -> list[int]:
    """The tokens around the needle."""
    if filler is not None:
        window: NDArray[np.int64] = filler.read(draw.randint(0, filler.tokens - room), room)
        return [int(token) for token in window]
    period = encode(PERIOD)
    return (period * (room // len(period) + 1))[:room]
