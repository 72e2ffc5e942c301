"""What a check is, of a rule or of a task: figures held to a limit, and one line that says what they mean."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Subject = TypeVar("Subject")


@dataclass(frozen=True)
class CheckResult:
    """One check of one rule or task.

    figure: what was measured in the worst setting; None where the code that is checked raised.
    message: the setting, the figure against its limit and, where the check failed, the likely cause.
    """

    name: str
    passed: bool
    figure: float | None
    message: str


class Measured(NamedTuple):
    """A figure, what it is of, and its cause where that is known better than in general."""

    figure: float
    what: str
    cause: str = ""


@dataclass(frozen=True)
class Check(Generic[Subject]):
    """A measurement, and the limit that its figures keep. at_least: whether the limit is a lower one."""

    name: str
    measure: Callable[[Subject], Iterator[Measured]]
    limit: float
    cause: str
    at_least: bool = False

    def slack(self, figure: float) -> float:
        """How far inside the limit a figure is; below 0 is a failure, and so is what is not a number."""
        if math.isnan(figure):
            return -math.inf
        return figure - self.limit if self.at_least else self.limit - figure

    def judge(self, worst: Measured, where: str, note: str = "") -> CheckResult:
        """The result of the worst figure, measured at `where`."""
        passed = self.slack(worst.figure) >= 0
        message = f"{where}: {worst.what} is {worst.figure:.3g}"
        message += f", must be {'at least' if self.at_least else 'at most'} {self.limit:g}{note}"
        if not passed:
            message += f"; likely cause: {worst.cause or self.cause}"
        return CheckResult(self.name, passed, worst.figure, message)

    def raised(self, error: Exception, where: str) -> CheckResult:
        """The result where the code that is checked raised: a stranger's, so that is a finding and no crash of ours."""
        text = " ".join(str(error).split())
        return CheckResult(self.name, False, None, f"{where}: raised {type(error).__name__}: {text}")
