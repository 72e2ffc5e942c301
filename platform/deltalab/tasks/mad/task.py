"""The common part of the six tasks of MAD: a training set of a fixed size, and accuracy over tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.task import Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class MAD(Task):
    """A task of Mechanistic Architecture Design, with V = `vocab_size` and L = `length`.

    Where the paper leaves something open, the tasks follow the code of its authors (github.com/athms/mad-lab), and note
    where they depart from the code. Defaults are those of the paper. The paper varies V, L, `train_examples` and a
    task's own parameters one at a time, and tests on 1,280 examples.

    The metric is accuracy, the share of right answers among all scored tokens. The authors average over the tokens that
    can be answers, which are equally frequent.

    Attributes:
        train_examples: The number of examples that a seed trains on; None for new examples at every step.

    Raises:
        InputError: `train_examples` is below 1.

    References:
        Poli et al. 2024, arXiv:2403.17844.
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
    """Returns, for each place of ids [B, n], the first place in its row with the same id.

    Examples:
        >>> first_use(torch.tensor([[5, 7, 5, 5, 7]]))
        tensor([[0, 1, 0, 0, 1]])
    """
    by_id, place = ids.sort(dim=1, stable=True)
    opens = torch.ones_like(ids, dtype=torch.bool)
    opens[:, 1:] = by_id[:, 1:] != by_id[:, :-1]
    order = torch.arange(ids.shape[1], device=ids.device)
    opened = torch.where(opens, order, 0).cummax(dim=1).values
    return torch.empty_like(place).scatter_(1, place, place.gather(1, opened))
