"""The process of one logger. It handles the driver's requests one at a time, and ends when the driver ends."""

import json
import os
import queue
import sys
import threading
from typing import Any, TextIO

from deltalab.errors import one_line
from deltalab.loggers import LoggedReport, LoggedRun, LoggedStudy, Logger, make_logger

GRACE_SECONDS = 10.0
"""How long a call may take after the driver has died."""


def main(name: str) -> None:
    """Reads a request from each line of JSON on stdin, and writes an answer as a line to stdout, until stdin ends.

    The first line that it prints says whether the logger could be made.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints goes to stderr, also before the process dies
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        logger = make_logger(name)
    except ModuleNotFoundError as error:
        _answer(answers, {"missing": error.name or str(error)})
        return
    except BaseException as error:
        _answer(answers, {"error": _error_line(error)})
        return
    _answer(answers, {})
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests,), daemon=True).start()
    while (line := requests.get()) is not None:
        try:
            _answer(answers, _handle(logger, json.loads(line)))
        except Exception as error:
            _answer(answers, {"error": _error_line(error)})


def _read(requests: "queue.SimpleQueue[str | None]") -> None:
    """Puts the lines of stdin into a queue, and ends the process soon after stdin ends."""
    for line in sys.stdin:
        requests.put(line)
    requests.put(None)
    threading.Timer(GRACE_SECONDS, os._exit, (1,)).start()  # a library may hang


def _handle(logger: Logger, request: dict[str, Any]) -> dict[str, Any]:
    """Passes a request to the logger, and returns the answer for the driver."""
    if "begin" in request:
        seen = [*logger.begin(LoggedStudy(**request["begin"]))]
        return {"seen": seen, "where": str(getattr(logger, "where", ""))}
    if "log" in request:
        fields = request["log"]
        curves = {name: [(step, value) for step, value in points] for name, points in fields["curves"].items()}
        logger.log(LoggedRun(**{**fields, "curves": curves}))
    if "end" in request:
        logger.end(LoggedReport(**request["end"]))
    return {}


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    """Writes an answer as a line of JSON."""
    try:
        answers.write(json.dumps(answer) + "\n")
    except BrokenPipeError:  # the driver is gone
        os._exit(1)


def _error_line(error: BaseException) -> str:
    """Returns an error in one line."""
    return one_line(f"{type(error).__name__}: {error}", 300)
