"""The common part of the proxies: accuracy over the scored tokens."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab.tasks.task import Batch, Task, surprisal


@dataclass(frozen=True, kw_only=True)
class Proxy(Task):
    """A task whose metric is accuracy, the share of right answers among all scored tokens.

    The share of right answers in each of `kinds` is a metric of its own. The inputs decide every answer, so that the
    best accuracy is 1, unless a task says otherwise.
    """

    metric: ClassVar[str] = "accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    @property
    def ceiling(self) -> float:
        """The best accuracy that any model can have."""
        return 1.0

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        """Returns, for each further metric, which of the N scored answers it counts, bool [N]."""
        return {}

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = (logits.argmax(-1) == batch.labels).double()
        nats = surprisal(batch, logits).double()
        count = nats.new_tensor(len(nats))
        counted = {name: kind.double() for name, kind in self.kinds(batch).items()}
        return {
            "accuracy": (right.sum(), count),
            "loss": (nats.sum(), count),
            **{name: ((right * kind).sum(), kind.sum()) for name, kind in counted.items()},
        }
