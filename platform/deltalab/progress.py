"""Tells on stderr how far a command is: lines for people, or with `--progress json` lines of JSON for programs."""

import json
import logging
import sys
from typing import Any, Literal

from deltalab.errors import one_line

Form = Literal["text", "json"]

_form: Form = "text"


def tell_in(form: Form) -> None:
    """Chooses the form of all lines of this process. In JSON, warnings of libraries and of `logging` are notes, too."""
    global _form
    _form = form
    logger = logging.getLogger()
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Notes)]:
        logger.removeHandler(handler)
    logging.captureWarnings(form == "json")
    if form == "json":
        logger.addHandler(_Notes(logging.WARNING))


def is_json() -> bool:
    """Returns whether the lines are JSON. Bars, which redraw their line, are for people."""
    return _form == "json"


def advance(text: str, **figures: Any) -> None:
    """Tells that the work goes on.

    Args:
        text: The line for people.
        figures: Figures for programs, such as `done` and `total`, beside the text.
    """
    _print(text, {"progress": {"text": text, **figures}})


def note(text: str) -> None:
    """Tells what the user should know, and what is no progress."""
    line = one_line(text)
    _print(line, {"note": line})


def _print(text: str, entry: dict[str, Any]) -> None:
    """Prints one line on stderr."""
    print(json.dumps(entry) if is_json() else text, file=sys.stderr, flush=True)


class _Notes(logging.Handler):
    """Tells each record of `logging` as a note."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())
