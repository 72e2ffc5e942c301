"""A griffe extension: makes the house's docstrings, which are plain text, into Markdown."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?)(?:^(?!\s*$).*\n?)*", flags=re.MULTILINE)


class PlainText(griffe.Extension):
    """Fences the examples, and keeps `<` and `*` from being read as HTML and as emphasis."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    parts, end = [], 0
    for example in EXAMPLE.finditer(text):
        parts += [prose(text[end : example.start()]), f"```pycon\n{example[0].rstrip()}\n```\n"]
        end = example.end()
    return "".join([*parts, prose(text[end:])])


def prose(text: str) -> str:
    """Outside of code, marked by backticks or by an indent, nothing is HTML or emphasis."""
    lines = []
    for line in text.splitlines(keepends=True):
        spans = re.split(r"(`[^`]*`)", line)
        shown = "".join(s if s.startswith("`") else re.sub(r"([*_<\[\]])", r"\\\1", s) for s in spans)
        lines.append(line if line.startswith("    ") else shown)
    return "".join(lines)
