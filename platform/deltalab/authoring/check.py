"""Checks of rules and tasks. A check measures figures, compares them with a limit and reports a result in one line."""

import math
import multiprocessing
import os
import signal
import sysconfig
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

Subject = TypeVar("Subject")
AnyCheck = TypeVar("AnyCheck", bound="Check[Any]")

NOT_FINITE = "the rule or task computes values that are not finite: look for a division by 0, an overflow or 0 * inf"
RAISED = ": raised "


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one rule or task.

    Attributes:
        passed: Whether the worst figure keeps the limit.
        figure: The worst figure that was measured. It is None if that figure is not finite, if nothing could be
            measured, and if the checked code raised an error or crashed.
        message: The setting, the figure and its limit. If the check failed, also the likely cause and how to mend it.
    """

    name: str
    passed: bool
    figure: float | None
    message: str


class Measurement(NamedTuple):
    """A figure that a check measured.

    Attributes:
        figure: The number that is compared with the limit.
        what: The name of the figure in the message.
        cause: The likely cause of a failure; if it is empty, the check's own cause is reported.
        limit: The limit of this figure; if it is None, the check's own limit holds.
    """

    figure: float
    what: str
    cause: str = ""
    limit: float | None = None


class Note(NamedTuple):
    """A remark that a check makes to its reader. A remark is no failure."""

    text: str


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A check: the function that measures figures, and the limit that all of these figures must keep.

    Attributes:
        measure: Measures a subject, such as a rule or a task. Yields a `Measurement` for each figure, and `Note`s.
        limit: The largest figure that passes.
        cause: The likely cause of a failure.
        at_least: Whether `limit` is the least figure that passes instead of the largest.
        mend: What the author should change; empty if `cause` already says it.
    """

    name: str
    measure: Callable[[Subject], Iterator[Any]]
    limit: float
    cause: str
    at_least: bool = False
    mend: str = ""

    def slack(self, figure: float, limit: float | None = None) -> float:
        """Returns how far a figure is from the limit: negative if it breaks the limit, -inf if it is NaN."""
        limit = self.limit if limit is None else limit
        if math.isnan(figure):
            return -math.inf
        return figure - limit if self.at_least else limit - figure

    def judge(self, worst: Measurement, where: str, note: str = "") -> CheckResult:
        """Returns the result of the check, which its worst figure decides.

        Args:
            worst: The worst of all figures.
            where: The rule or task, and the setting in which the figure was measured.
            note: Further text for the message.
        """
        limit = self.limit if worst.limit is None else worst.limit
        passed = self.slack(worst.figure, limit) >= 0
        message = f"{where}: {worst.what} is {worst.figure:.3g}"
        message += f", must be {'at least' if self.at_least else 'at most'} {limit:g}{note}"
        if not passed:
            cause = worst.cause or (NOT_FINITE if math.isnan(worst.figure) else self.cause)
            message += f"; likely cause: {cause}"
            if self.mend and cause == self.cause:
                message += f"; to mend it: {self.mend}"
        return CheckResult(self.name, passed, worst.figure if math.isfinite(worst.figure) else None, message)

    def raised(self, error: BaseException, where: str) -> CheckResult:
        """Returns the failed result of a check whose rule or task raised an error."""
        text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()  # any terminal can print it
        line = author_line(error)
        return CheckResult(
            self.name, False, None, f"{where}{RAISED}{type(error).__name__}: {text}{f' ({line})' if line else ''}"
        )


_PLATFORM = Path(__file__).parents[1]
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def author_line(error: BaseException) -> str:
    """Returns the last line of an author's file that an error passed through, as `file.py:12`, or an empty string."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", str(_PLATFORM), *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def run_checks(
    checks: Iterable[AnyCheck], run: Callable[[AnyCheck], CheckResult | None], *, where: str, forked: bool
) -> list[CheckResult]:
    """Runs all checks and returns their results in the same order.

    Args:
        checks: The checks to run.
        run: The function that runs one check. It returns None if the check does not apply, and the check is then left
            out of the results.
        where: The name of the rule or task, for the message of a check whose process crashed.
        forked: Whether each check runs in a process of its own. If compiled code crashes, only the check that ran it
            fails.
    """
    results = _forked(checks, run, where) if forked else map(run, checks)
    return [result for result in results if result is not None]


def told_once(results: list[CheckResult]) -> list[CheckResult]:
    """Returns the results with repeated errors merged.

    If several checks raised the same error, only the first of these checks keeps its result. The message of that result
    names all checks that raised the error.
    """
    first_at: dict[str, int] = {}
    kept: list[CheckResult] = []
    merged: dict[int, list[str]] = {}
    for result in results:
        _, raised, error = result.message.partition(RAISED)
        if raised and not result.passed and error in first_at:
            merged.setdefault(first_at[error], []).append(result.name)
            continue
        if raised and not result.passed:
            first_at[error] = len(kept)
        kept.append(result)
    for i, names in merged.items():
        remark = f"; {len(names) + 1} checks raised it: {', '.join([kept[i].name, *names])}"
        kept[i] = replace(kept[i], message=kept[i].message + remark)
    return kept


def _forked(
    checks: Iterable[AnyCheck], run: Callable[[AnyCheck], CheckResult | None], where: str
) -> Iterator[CheckResult | None]:
    """Runs each check in its own process, as many at a time as there are cores. Yields the results in order."""
    # A forked process inherits the rule. A spawned one would need a pickle of the rule, whose class may come from a
    # plugin file under any name.
    fork = multiprocessing.get_context("fork")
    running: deque[tuple[str, Any, Any]] = deque()

    def child(sender: Any, check: AnyCheck) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
        sender.send(run(check))

    def first() -> CheckResult | None:
        return _received(*running.popleft(), where)

    for check in checks:
        while len(running) >= (os.cpu_count() or 1):
            yield first()
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=child, args=(sender, check))
        process.start()
        sender.close()
        running.append((check.name, process, receiver))
    while running:
        yield first()


def _received(name: str, process: Any, receiver: Any, where: str) -> CheckResult | None:
    """Waits for the process of a check and returns its result, or a failure if the process crashed."""
    try:
        result: CheckResult | None = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += "; likely cause: a kernel or a torch.linalg function that cannot take the values it is given"
        else:
            how = f"exited with code {code}"
        return CheckResult(name, False, None, f"{where}: the process of this check {how}")
    process.join()
    return result
