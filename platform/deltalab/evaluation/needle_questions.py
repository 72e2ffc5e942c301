"""A single needle in a haystack, asked of a language model of text.

It is S-NIAH of RULER (Hsieh et al. 2024, arXiv:2404.06654), and the task `niah` in words: a text of a given number of
tokens holds the sentence `NEEDLE` at a random place, and ends with the question and the start of its answer, up to the
number.
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
        """The ids of a text."""


@dataclass(frozen=True)
class Question:
    """tokens: the haystack with its needle, and the question. answer: the tokens of the number."""

    tokens: list[int]
    answer: list[int]


def questions(
    encode: Encoder, length: int, count: int, *, filler: Split | None = None, seed: int = 0
) -> Iterator[Question]:
    """`count` questions of exactly `length` tokens, answer included; none where `length` is too short for one.

    filler: the haystack is a window of this split, at a random place; None repeats `PERIOD`. The needle's place among
    the tokens of the haystack is uniform. The same arguments give the same questions.
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
    if filler is not None:
        window: NDArray[np.int64] = filler.read(draw.randint(0, filler.tokens - room), room)
        return [int(token) for token in window]
    period = encode(PERIOD)
    return (period * (room // len(period) + 1))[:room]
