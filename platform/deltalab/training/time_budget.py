"""The time of a training that ends after so many seconds: what is spent, and the rates that follow it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from deltalab.training.spec import TrainSpec

STEPS = "steps"
"""The metric of split `cost` that says how many steps a run has trained whose time ended it."""
BLOCKS = 100
"""The parts of the time after each of which the clock is read."""


def reached(step: int, steps: int, seconds: float | None) -> str:
    """Says how far a training is: at which step, or after how many of the seconds that end it.

    Args:
        step: The place in the training's schedule, as a beat tells it.
        steps: The most steps of the training.
        seconds: Its `TrainSpec.seconds`.

    Examples:
        >>> reached(1200, 3000, None), reached(52786, 100000, 30.0)
        ('step 1,200 of 3,000', '15.8 of 30 s')
    """
    if seconds is None:
        return f"step {step:,} of {steps:,}"
    return f"{step / steps * seconds:,.{1 if seconds < 100 else 0}f} of {seconds:,g} s"


class TimeBudget:
    """The seconds of a training's steps. Compilation, evaluations and checkpoints are not added to them.

    Args:
        seconds: The seconds after which the training ends.
        steps: The most steps.

    Attributes:
        spent: The seconds that each run has trained.
    """

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps, self.spent = seconds, steps, 0.0
        self._step, self._of_step = 0, 0.0

    @property
    def over(self) -> bool:
        """Whether all the time is spent."""
        return self.spent >= self.seconds

    def read(self, step: int, seconds: float | None) -> None:
        """Notes that `step` steps are done, and what a run took for those since the last reading; None: not counted."""
        if seconds is not None:
            self.spent, self._of_step = self.spent + seconds, seconds / (step - self._step)
        self._step = step

    def go_on(self, step: int, spent: float) -> None:
        """Goes on after `step` steps, of which each run took `spent` seconds."""
        self._step, self.spent = step, spent

    def next_block(self) -> int:
        """Returns the steps after which to read the clock again: about 1% of the time, and never more than is left."""
        if not self._of_step:
            return 1
        return max(1, int(min(self.seconds / BLOCKS, self.seconds - self.spent) / self._of_step))

    def place(self, step: int) -> float:
        """Returns where a step stands in a training of all the steps: there, or further if the time is.

        The time of steps after the last reading of the clock is that of the steps before it.
        """
        spent = self.spent + max(0, step - self._step) * self._of_step
        return max(step, min(1.0, spent / self.seconds) * self.steps)


class TimedRates(Sequence[float]):
    """The learning rates of a training, of which time says how much is done.

    Args:
        spec: The settings of the training.
        budget: Its time.
    """

    def __init__(self, spec: "TrainSpec", budget: TimeBudget) -> None:
        self._spec, self._budget = spec, budget

    def __len__(self) -> int:
        return self._spec.steps

    @overload
    def __getitem__(self, step: int) -> float: ...
    @overload
    def __getitem__(self, step: slice) -> Sequence[float]: ...
    def __getitem__(self, step: int | slice) -> float | Sequence[float]:
        if isinstance(step, slice):
            return [self[one] for one in range(*step.indices(len(self)))]
        return self._spec.learning_rate(self._budget.place(step))
