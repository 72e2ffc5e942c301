"""Says which checkpoints of a run are milestones, which stay beside the newest ones."""

from pathlib import Path


def step_of(checkpoint: Path) -> int:
    """Returns the step of a checkpoint named `step-N`."""
    return int(checkpoint.name.removeprefix("step-"))


def is_milestone(step: int, milestones: int | None) -> bool:
    """Returns whether the checkpoint after a step stays.

    Args:
        step: The step.
        milestones: The checkpoints after each so many steps stay; None for no such checkpoint.
    """
    return milestones is not None and step % milestones == 0
