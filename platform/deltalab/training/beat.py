"""The sign of life that a training gives to whoever supervises it."""

import math
from typing import Protocol

STEP = "step"


class Beat(Protocol):
    """Called where a training begins something that should end soon.

    what: `STEP` for a step like the ones before; other words for what may take longer, such as the first steps, which
    compile kernels. step: the number of updates done so far; None where it has not changed. ends: when the training
    must have ended, by `time.monotonic`.
    An exception that it raises ends the training.
    """

    def __call__(self, what: str, step: int | None = None, ends: float = math.inf) -> None: ...


def unheard(what: str, step: int | None = None, ends: float = math.inf) -> None:
    """The beat of a training that nobody supervises."""
