"""The common part of the six tasks of MAD: a training set of a fixed size, and accuracy over tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.task import Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class MAD(Task):
    """A task of Mechanistic Architecture Design (Poli et al. 2024, arXiv:2403.17844), V = `vocab_size`, L = `length`.

    Where the paper leaves something open, tasks follow its authors' code (github.com/athms/mad-lab), and say where they
    depart from it. Defaults are the paper's. It varies V, L, `train_examples` and a task's own parameters one at a
    time, and tests on 1,280 examples.

    Metric: accuracy, the share of right answers among all scored tokens. (The authors average over the tokens that can
    be answers, which are equally frequent.)

    `train_examples`: the number of examples that a seed trains on; None for new ones at every step. Raises `InputError`
    for a number below 1.
    """

    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    train_examples: int | None = 12_800

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.train_examples is None or self.train_examples >= 1, "train_examples", "must be at least 1")

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = logits.argmax(-1) == batch.labels
        nats = surprisal(batch, logits).double()
        count = nats.new_tensor(len(nats))
        return {"accuracy": (right.sum().double(), count), "loss": (nats.sum(), count)}


def first_use(ids: Tensor) -> Tensor:
    """The first place in each row `[B, n]` that has the id of a place, for all places.

    >>> first_use(torch.tensor([[5, 7, 5, 5, 7]]))
    tensor([[0, 1, 0, 0, 1]])
    """
    by_id, place = ids.sort(dim=1, stable=True)
    opens = torch.ones_like(ids, dtype=torch.bool)
    opens[:, 1:] = by_id[:, 1:] != by_id[:, :-1]
    order = torch.arange(ids.shape[1], device=ids.device)
    opened = torch.where(opens, order, 0).cummax(dim=1).values
    return torch.empty_like(place).scatter_(1, place, place.gather(1, opened))
