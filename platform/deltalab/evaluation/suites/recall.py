"""Prompts whose answer stands in a text before them: FDA, SWDE, SQuAD, TriviaQA, NQ and DROP in cloze form.

Base models do not follow instructions, so that a prompt is a text to complete. The authors cut the text to a window
around the answer. https://github.com/HazyResearch/prefix-linear-attention has their code.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deltalab.errors import InputError

TOKENS = 48
"""The most tokens of an answer. It ends before a line break."""

RESERVE = 50
"""The tokens of the context length that are kept for the answer."""

SUMMARY = "Summary of information above..."
"""The line of SWDE's texts after which their own prompt stands."""

FIELDS = {
    "pairs": ("text", ("key", "value")),
    "completion": ("text", ("value",)),
    "question": ("context", ("answers",)),
}
"""By form, the field with the text, and the fields whose first mention in it is the middle of the window."""


class Coder(Protocol):
    """A tokenizer, without special tokens."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of ids."""


@dataclass(frozen=True)
class Prompt:
    """A text to complete.

    Attributes:
        text: The text.
        answers: Answers, one of which must stand in the continuation.
    """

    text: str
    answers: tuple[str, ...]


def prompts(
    rows: Iterator[Mapping[str, Any]], form: str, coder: Coder, length: int, *, twice: bool, where: str
) -> Iterator[Prompt]:
    """Yields the prompts of a data set's rows. A row whose answer has less than two letters has none.

    Args:
        rows: The rows.
        form: One of `FIELDS`.
        coder: The tokenizer that measures lengths.
        length: The tokens of a text, `RESERVE` for the answer included.
        twice: Whether the text stands in the prompt twice, with a hint at the question before it.
        where: Names the data set in messages.

    Raises:
        InputError: If a row lacks a field, or a field does not hold text.
    """
    for row in rows:
        _check(row, form, twice, where)
        prompt = _prompt(row, form, coder, length, twice)
        if prompt is not None:
            yield prompt


def require_room(length: int) -> None:
    """Raises `InputError` if the tokens of a text leave none beside those that are kept for the answer."""
    if length <= RESERVE:
        raise InputError(f"--lengths: {length} tokens are too few for recall, which keeps {RESERVE} for the answer")


def contains(prompt: Prompt, continuation: str) -> float:
    """Returns 1.0 if an answer stands in the continuation, in whatever case, else 0.0."""
    return float(any(re.search(re.escape(answer), continuation, re.IGNORECASE) for answer in prompt.answers))


def window(text: str, anchors: Sequence[str], coder: Coder, tokens: int) -> str:
    """Cuts a text to a window around the first place where one of the anchors stands, in whatever case.

    As the authors do, half of the tokens come before the anchor, if so many do. If no anchor stands in the text, its
    end counts as one.

    Args:
        text: The text.
        anchors: Texts.
        coder: The tokenizer.
        tokens: The most tokens of the window.
    """
    found = [match.start() for a in anchors if (match := re.search(re.escape(a), text, re.IGNORECASE))]
    ids = coder.encode(text)
    place = len(coder.encode(text[: min(found)])) if found else len(ids)
    begin = max(0, place - tokens // 2)
    return coder.decode(ids[begin : begin + tokens])


def _check(row: Mapping[str, Any], form: str, twice: bool, where: str) -> None:
    """Raises `InputError` if a row lacks a field that its prompt is made of, or if the field does not hold text."""
    field, anchors = FIELDS[form]
    asked = {"pairs": (), "completion": ("question", "context") if twice else (), "question": ("question",)}[form]
    twice_asked = ("orig_question",) if twice and form == "question" else ()
    for name in (field, *anchors, *asked, *twice_asked):
        if name not in row:
            raise InputError(f"{where}: a row has no field '{name}'; it has {', '.join(row)}")
        value, kind = row[name], "a text"
        texts: list[Any] = [value]
        if name == "answers":
            kind, texts = "a list of texts", list(value) if isinstance(value, list | tuple) else [None]
        elif name == "key":
            kind, texts = "a text of a letter or more", [value or None]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{where}: field '{name}' of a row must be {kind}, not {value!r:.100}")


def _prompt(row: Mapping[str, Any], form: str, coder: Coder, length: int, twice: bool) -> Prompt | None:
    field, anchor_fields = FIELDS[form]
    answers = tuple(row["answers"]) if form == "question" else (row["value"],)
    anchors = answers if form == "question" else [row[name] for name in anchor_fields]
    if not answers or len(answers[0]) < 2:
        return None
    text = re.sub(r"\[(?:PAR|DOC|TLE)\]", "", row[field]).split(SUMMARY)[0].strip()
    text = window(text, anchors, coder, length - RESERVE)
    if form == "completion":
        before = f"{row['question']} {row['context'].split('Question:')[0]}\n" if twice else ""
        return Prompt(before + text.strip(), answers)
    if form == "pairs":
        key = row["key"][0].upper() + row["key"][1:]
        hint, question = f"Information about {key}.", f"{key}:"
    else:
        question = row["question"].strip()
        hint = row["orig_question"].strip(":") if twice else ""
    body = _without(text, question)
    return Prompt(f"{hint} {body}\n{body} {question}" if twice else f"{body} {question}", answers)


def _without(text: str, question: str) -> str:
    """The text without the question that it may end with, and with one full stop at its end."""
    text = text.strip()
    while text.lower().endswith(question.lower()):
        text = text[: -len(question)].strip()
    return f"{text.strip('.').strip()}."
