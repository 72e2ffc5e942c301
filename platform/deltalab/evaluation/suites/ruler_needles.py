"""Texts of RULER in which sentences hide that give a key its value."""

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from deltalab.evaluation.suites.words import compound

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
PROMPT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {keys} mentioned in the provided "
    "text? The special magic {kind} for {keys} mentioned in the provided text are"
)
PROMPT_OF_ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{kind} afterwards.\n{context}\nWhat is the special magic {kind} for {keys} mentioned in the provided text? The "
    "special magic {kind} for {keys} mentioned in the provided text is"
)
DEPTHS = 40
"""The places among the sentences of essays where a needle may stand."""

WORDS_AT_LEAST = 50
"""The fewest words of essays around needles."""


@dataclass(frozen=True)
class Needles:
    """Needles in a haystack: repeated noise, essays, or further needles.

    Attributes:
        haystack: noise, essays or needles.
        keys: words or uuids.
        values: numbers or uuids.
        words: The words of the essays; they are repeated if they do not suffice.
        needles: The keys that have a value, apart from those of a haystack of needles.
        of_each: The values of each key.
        asked: The keys that are asked.
    """

    haystack: str
    keys: str
    values: str
    words: Sequence[str] = ()
    needles: int = 1
    of_each: int = 1
    asked: int = 1
    answer_tokens: ClassVar[int] = 128

    def text(self, draw: random.Random, size: int, index: int) -> tuple[str, list[str]]:
        """Returns a prompt and the values of the keys that it asks for.

        Args:
            draw: The source of random numbers.
            size: How many words, noises or needles stand around the needles, beyond the fewest that must.
            index: Not read: a draw gives each example its own needles.
        """
        used: set[str] = set()
        values = {
            _fresh(draw, self.keys, used): [_fresh(draw, self.values, used) for _ in range(self.of_each)]
            for _ in range(self.needles)
        }
        needles = [NEEDLE.format(kind=self.values, key=key, value=one) for key in values for one in values[key]]
        keys = draw.sample(list(values), self.asked)
        draw.shuffle(needles)
        context = self._context(draw, size, needles, used)
        single = self.asked * self.of_each == 1
        prompt = (PROMPT_OF_ONE if single else PROMPT).format(
            kind=self.values.removesuffix("s") if single else self.values,
            context=context,
            keys=", ".join(keys[:-1]) + f", and {keys[-1]}" if len(keys) > 1 else keys[0],
        )
        return prompt, [value for key in keys for value in values[key]]

    def _context(self, draw: random.Random, size: int, needles: list[str], used: set[str]) -> str:
        if self.haystack == "essays":
            count = WORDS_AT_LEAST + size
            words = [*self.words] * (count // len(self.words) + 1)
            sentences = re.split(r"(?<=[.!?])\s+", " ".join(words[:count]))
            places = sorted(
                len(sentences) * depth // (DEPTHS - 1) for depth in draw.sample(range(DEPTHS), len(needles))
            )
            for place, needle in zip(reversed(places), reversed(needles), strict=True):
                sentences.insert(place, needle)
            return " ".join(sentences)
        lines = [NOISE] * (len(needles) + size)
        if self.haystack == "needles":
            lines = [
                NEEDLE.format(
                    kind=self.values, key=_fresh(draw, self.keys, used), value=_fresh(draw, self.values, used)
                )
                for _ in lines
            ]
        for place, needle in zip(
            sorted(draw.sample(range(len(lines)), len(needles)), reverse=True), needles, strict=True
        ):
            lines.insert(place, needle)
        return "\n".join(lines)


def _fresh(draw: random.Random, kind: str, used: set[str]) -> str:
    """A word, number or UUID that the text does not have yet."""
    tries = 0
    while True:
        new = MAKERS[kind](draw, tries)
        if new not in used:
            used.add(new)
            return new
        tries += 1


MAKERS: dict[str, Callable[[random.Random, int], str]] = {
    "words": lambda draw, tries: compound(draw, 2 + tries // 8),
    "numbers": lambda draw, tries: str(draw.randrange(10**6, 10**7)),
    "uuids": lambda draw, tries: str(uuid.UUID(int=draw.getrandbits(128), version=4)),
}
"""How keys and values are drawn. After eight words that the text has, a word has one part more."""
