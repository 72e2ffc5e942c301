"""The sign of life that a training gives to whoever supervises it."""

import math
from typing import Protocol

STEP = "step"
"""The value of `what` that reports an ordinary training step."""

FIRST_STEPS = "first steps"
"""The value of `what` that reports one of the steps that compile kernels."""

EVALUATION = "evaluation"
"""The value of `what` that reports a batch of an evaluation."""


class Beat(Protocol):
    """The function that a training calls before each piece of work that should end soon.

    An exception that the function raises ends the training.
    """

    def __call__(self, what: str, step: int | None = None, ends: float = math.inf) -> None:
        """Notes that the training is alive.

        Args:
            what: `STEP` for an ordinary step. Any other words name work that may take longer, such as `FIRST_STEPS`.
            step: The number of updates so far; None if it has not changed.
            ends: The time of `time.monotonic` by which the training must have ended.
        """


def unheard(what: str, step: int | None = None, ends: float = math.inf) -> None:
    """Does nothing. A training that nobody supervises calls this function."""
