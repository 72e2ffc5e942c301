"""Counts the operators that PyTorch runs in one training step of a stack of three small models, on a CPU.

    python benchmarks/step_operators.py                                       # of this commit
    PYTHONPATH=OTHER/platform:OTHER/plugins python benchmarks/step_operators.py  # of another checkout

Two commits whose stacks run the same operators are as fast as each other; times on two cores do not tell 5% apart.
"""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import deltalab
from deltalab.models.spec import ModelSpec
from deltalab.training.train import TrainSpec, train

RULES = ("gated_deltanet", "comba", "gla", "rdn", "attention")


class Counted(TorchDispatchMode):
    """Counts the operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def of_training(rule: str, steps: int) -> Counter[str]:
    """Counts the operators of a whole training."""
    task = deltalab.get_task("mqar", length=32, pairs=4, vocab_size=64)
    model = ModelSpec(rule=rule, vocab_size=64, d_model=16, layers=2, heads=2, chunk_size=16)
    with Counted() as counted:
        train(task, model, TrainSpec(steps=steps, batch_size=8, lr=1e-2, evaluations=1), [1, 2, 3])
    return counted.names


def main() -> None:
    for rule in RULES:
        of_training(rule, 5)  # What is found once for a model is not of a step.
        step = of_training(rule, 6)
        step.subtract(of_training(rule, 5))
        print(f"{rule}: {step.total():,}", {name: count for name, count in sorted(step.items()) if count})


if __name__ == "__main__":
    main()
