"""Counts the seconds of training steps, which end a training whose recipe sets `seconds`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Clock:
    """The time of the steps of a training. The first step of each process is not counted, since it compiles.

    Args:
        seconds: The seconds after which the training ends. None sets no end, and counts nothing.

    Attributes:
        spent: The seconds of the steps so far. All processes have the number of the first process.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self.spent = seconds, 0.0
        self._since: float | None = None
        self._step = 0

    @property
    def over(self) -> bool:
        """Whether the training ends with the step that was counted last."""
        return self.seconds is not None and self.spent >= self.seconds

    def tick(self, step: int) -> None:
        """Counts the time since the last tick. A step that was counted is not counted again."""
        if self.seconds is None or step <= self._step:
            return
        now = time.perf_counter()
        self.spent += 0.0 if self._since is None else now - self._since
        self._since, self._step = now, step
        if dist.is_initialized() and dist.get_world_size() > 1:  # all must end with the same step
            device = "cuda" if torch.cuda.is_available() else "cpu"
            spent = torch.tensor(self.spent, dtype=torch.float64, device=device)
            dist.broadcast(spent, 0)
            self.spent = float(spent)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Does not count the time inside of the `with` block, such as that of a validation or a checkpoint."""
        if self.seconds is not None and torch.cuda.is_available():
            torch.cuda.synchronize()  # the steps before the block still run
        began = time.perf_counter()
        yield
        if self._since is not None:
            self._since += time.perf_counter() - began
