"""Checks of a rule or a task: each holds measured figures to a limit and explains the result in one line."""

import math
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

Subject = TypeVar("Subject")
AnyCheck = TypeVar("AnyCheck", bound="Check[Any]")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check of one rule or task.

    figure: the worst figure measured; None if it is not finite, or if the checked code raised an error or crashed.
    message: the setting, the figure, its limit and, if the check failed, the likely cause.
    """

    name: str
    passed: bool
    figure: float | None
    message: str


class Measured(NamedTuple):
    """A figure, what it measures, and its likely cause where the measurement knows better than the check."""

    figure: float
    what: str
    cause: str = ""


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A measurement and the limit of its figures: an upper limit, or a lower one where `at_least`."""

    name: str
    measure: Callable[[Subject], Iterator[Measured]]
    limit: float
    cause: str
    at_least: bool = False

    def slack(self, figure: float) -> float:
        """The distance of a figure from the limit, negative if it breaks the limit; NaN breaks every limit."""
        if math.isnan(figure):
            return -math.inf
        return figure - self.limit if self.at_least else self.limit - figure

    def judge(self, worst: Measured, where: str, note: str = "") -> CheckResult:
        """The result for the worst figure, measured at `where`."""
        passed = self.slack(worst.figure) >= 0
        message = f"{where}: {worst.what} is {worst.figure:.3g}"
        message += f", must be {'at least' if self.at_least else 'at most'} {self.limit:g}{note}"
        if not passed:
            message += f"; likely cause: {worst.cause or self.cause}"
        return CheckResult(self.name, passed, worst.figure if math.isfinite(worst.figure) else None, message)

    def raised(self, error: BaseException, where: str) -> CheckResult:
        """The failure of a check whose rule or task raised an error: a finding, not a crash of the platform."""
        text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()  # printable everywhere
        return CheckResult(self.name, False, None, f"{where}: raised {type(error).__name__}: {text}")


def run_checks(
    checks: Iterable[AnyCheck], run: Callable[[AnyCheck], CheckResult | None], *, where: str, forked: bool
) -> list[CheckResult]:
    """Runs all checks; a check that does not apply returns None and is left out.

    forked: run each check in a process of its own, so that compiled code that crashes fails that check alone.
    """
    results = [_forked(check.name, partial(run, check), where) if forked else run(check) for check in checks]
    return [result for result in results if result is not None]


def _forked(name: str, run: Callable[[], CheckResult | None], where: str) -> CheckResult | None:
    # A fork needs no pickle of the rule, which a plugin file may define under any name.
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)

    def child() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports Ctrl-C
        sender.send(run())

    process = fork.Process(target=child)
    process.start()
    sender.close()
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
