"""What the six tasks of MAD share: a training set of a fixed size, and the share of tokens that are right."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.task import Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class MAD(Task):
    """A task of Mechanistic Architecture Design (Poli et al. 2024, arXiv:2403.17844), V = `vocab_size`, L = `length`.

    Where the paper leaves something open, the law is that of its authors' code (github.com/athms/mad-lab), from which
    a task departs only as it says. Defaults are the paper's; it varies V, L, `train_examples` and a task's own
    parameters one at a time, and tests on 1,280 examples.

    Metric: accuracy, the share of right answers among all scored tokens. (The authors' average it over the tokens that
    can be answers, which are equally frequent.)

    `train_examples`: how many examples a seed trains on; None for new ones without end. At least 1 (`InputError`
    otherwise).
    """

    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True

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
    """For each place of each row `[B, n]`, the first place of that row with the same id.

    >>> first_use(torch.tensor([[5, 7, 5, 5, 7]]))
    tensor([[0, 1, 0, 0, 1]])
    """
    by_id, place = ids.sort(dim=1, stable=True)
    opens = torch.ones_like(ids, dtype=torch.bool)
    opens[:, 1:] = by_id[:, 1:] != by_id[:, :-1]
    order = torch.arange(ids.shape[1], device=ids.device)
    opened = torch.where(opens, order, 0).cummax(dim=1).values
    return torch.empty_like(place).scatter_(1, place, place.gather(1, opened))
