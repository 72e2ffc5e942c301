"""The process of one logger: it does what the driver asks, one thing at a time, and ends with the driver."""

import json
import os
import queue
import sys
import threading
from typing import Any, TextIO

from deltalab.errors import one_line
from deltalab.loggers import LoggedReport, LoggedRun, LoggedStudy, Logger, make_logger

GRACE_SECONDS = 10.0
"""How long a call may still take after the driver has died."""


def main(name: str) -> None:
    """Answers each line of JSON from stdin with one on stdout, until stdin ends.

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
        _answer(answers, {"error": _said(error)})
        return
    _answer(answers, {})
    asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(asked,), daemon=True).start()
    while (line := asked.get()) is not None:
        try:
            _answer(answers, _done(logger, json.loads(line)))
        except Exception as error:
            _answer(answers, {"error": _said(error)})


def _read(asked: "queue.SimpleQueue[str | None]") -> None:
    for line in sys.stdin:
        asked.put(line)
    asked.put(None)
    threading.Timer(GRACE_SECONDS, os._exit, (1,)).start()  # a library may hang


def _done(logger: Logger, asked: dict[str, Any]) -> dict[str, Any]:
    if "begin" in asked:
        seen = [*logger.begin(LoggedStudy(**asked["begin"]))]
        return {"seen": seen, "where": str(getattr(logger, "where", ""))}
    if "log" in asked:
        given = asked["log"]
        curves = {name: [(step, value) for step, value in points] for name, points in given["curves"].items()}
        logger.log(LoggedRun(**{**given, "curves": curves}))
    if "end" in asked:
        logger.end(LoggedReport(**asked["end"]))
    return {}


def _answer(answers: TextIO, said: dict[str, Any]) -> None:
    try:
        answers.write(json.dumps(said) + "\n")
    except BrokenPipeError:  # the driver is gone
        os._exit(1)


def _said(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)
