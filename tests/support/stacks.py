"""Runs that train as one stack, against the same runs alone."""

from torch import Tensor
from torch.testing import assert_close

from deltalab.models.spec import ModelSpec
from deltalab.tasks.task import Task
from deltalab.training.spec import TrainSpec
from deltalab.training.trainer import LockStep


def trained_stacked(task: Task, spec: ModelSpec) -> dict[str, Tensor]:
    """Trains two seeds as one stack and alone, asserts equal weights, and returns those of the first."""
    train = TrainSpec(steps=4, batch_size=4, lr=1e-2, precision="fp32", device="cpu", evaluations=1, eval_batches=1)
    runs = []
    for most in (2, 1):
        lock = LockStep(task, [(spec, train)], [1, 2], most=most)
        lock.advance(4, "validation")
        assert len(lock.stacks) == 3 - most
        runs.append([lock.results(0, weights=True)[i].weights for i in range(2)])
    for stacked, alone in zip(*runs, strict=True):
        for name, value in stacked.items():
            assert_close(value, alone[name], rtol=1e-4, atol=1e-5)
    return dict(runs[0][0])
