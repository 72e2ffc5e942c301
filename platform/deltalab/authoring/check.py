"""Checks of a rule or a task: each holds measured figures to a limit and explains the result in one line."""

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

    figure: the worst figure measured; None if it is not finite, if nothing could be measured, or if the checked code
        raised an error or crashed.
    message: the setting, the figure, its limit and, if the check failed, the likely cause and how to mend it.
    """

    name: str
    passed: bool
    figure: float | None
    message: str


class Measured(NamedTuple):
    """A figure, what it measures, and its likely cause and limit where the measurement knows better than the check."""

    figure: float
    what: str
    cause: str = ""
    limit: float | None = None


class Note(NamedTuple):
    """Something that the reader of a check should know and that is no failure."""

    text: str


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A measurement and the limit of its figures: an upper limit, or a lower one where `at_least`.

    cause: the likely cause of a failure. mend: what the author should change, empty where the cause says it.
    """

    name: str
    measure: Callable[[Subject], Iterator[Any]]
    limit: float
    cause: str
    at_least: bool = False
    mend: str = ""

    def slack(self, figure: float, limit: float | None = None) -> float:
        """The distance of a figure from the limit, negative if it breaks the limit; NaN breaks every limit."""
        limit = self.limit if limit is None else limit
        if math.isnan(figure):
            return -math.inf
        return figure - limit if self.at_least else limit - figure

    def judge(self, worst: Measured, where: str, note: str = "") -> CheckResult:
        """The result for the worst figure, measured at `where`."""
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
        """The failure of a check whose rule or task raised an error: a finding, not a crash of the platform."""
        text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()  # printable everywhere
        line = author_line(error)
        return CheckResult(
            self.name, False, None, f"{where}{RAISED}{type(error).__name__}: {text}{f' ({line})' if line else ''}"
        )


_PLATFORM = Path(__file__).parents[1]
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def author_line(error: BaseException) -> str:
    """`file.py:12`, the last line of an author's file that an error passed through; empty if it passed through none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(("<", str(_PLATFORM), *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return ""


def run_checks(
    checks: Iterable[AnyCheck], run: Callable[[AnyCheck], CheckResult | None], *, where: str, forked: bool
) -> list[CheckResult]:
    """Runs all checks; a check that does not apply returns None and is left out.

    forked: run each check in a process of its own, so that compiled code that crashes fails that check alone.
    """
    results = _forked(checks, run, where) if forked else map(run, checks)
    return [result for result in results if result is not None]


def told_once(results: list[CheckResult]) -> list[CheckResult]:
    """The results, with an error that several checks raised told once: by the first of them."""
    told: dict[str, int] = {}
    kept: list[CheckResult] = []
    others: dict[int, list[str]] = {}
    for result in results:
        _, raised, error = result.message.partition(RAISED)
        if raised and not result.passed and error in told:
            others.setdefault(told[error], []).append(result.name)
            continue
        if raised and not result.passed:
            told[error] = len(kept)
        kept.append(result)
    for i, names in others.items():
        said = f"; {len(names) + 1} checks raised it: {', '.join([kept[i].name, *names])}"
        kept[i] = replace(kept[i], message=kept[i].message + said)
    return kept


def _forked(
    checks: Iterable[AnyCheck], run: Callable[[AnyCheck], CheckResult | None], where: str
) -> Iterator[CheckResult | None]:
    """The results in the order of the checks, with as many processes at a time as there are cores."""
    # A fork needs no pickle of the rule, which a plugin file may define under any name.
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
