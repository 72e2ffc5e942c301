"""The common part of parity and modular arithmetic: sequences of many lengths with one answer at their end."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task, surprisal

SHORTEST = 3
"""The least total length at which a range may begin."""


@dataclass(frozen=True, kw_only=True)
class OneAnswer(Task):
    """A task whose sequences end in one answer.

    The total length of a sequence counts the answer, which is no input but the target at the last token. So `length` is
    `length_range[1] - 1`, and shorter sequences are padded on the right.

    The metric is scaled accuracy, (accuracy - r) / (1 - r) with r = 1 / `answers`. `chance` is 0 for answers that are
    equally frequent.

    A subclass defines `answers`, `padding`, `least` and `sequences`.

    Attributes:
        length_range: The least and the greatest total length of training, which draws uniformly, both ends included.
        test_range: The total lengths of validation and test, which also draw from `length_range`, under the label of
            that range.
        answers: The number of different answers.
        padding: The token that fills shorter sequences.

    Raises:
        InputError: A range is empty or begins below 3, `length_range` ends below `least`, or `test_range` begins below
            `least`.
    """

    metric: ClassVar[str] = "scaled_accuracy"
    maximize: ClassVar[bool] = True
    bounds: ClassVar[tuple[float, float] | None] = (-1.0, 1.0)
    answers: ClassVar[int]
    padding: ClassVar[int]

    length_range: tuple[int, int] = (3, 40)
    test_range: tuple[int, int] = (40, 256)

    @property
    @abstractmethod
    def least(self) -> int:
        """The least total length in validation and test. Shorter sequences, of which there are few, train."""

    @abstractmethod
    def sequences(self, total: Tensor, split: str, random: Random) -> tuple[Tensor, Tensor]:
        """Draws sequences and their answers.

        Args:
            total: The total lengths, [B].
            split: The split.
            random: The random numbers.

        Returns:
            Tokens [B, `length`], of which only the first `total - 1` count, and answers [B].
        """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length_range", "test_range"):
            low, high = getattr(self, name)
            self.require(low >= SHORTEST, name, f"must begin at {SHORTEST} or above")
            self.require(low <= high, name, "must not end before it begins")
            self.require(len(self.totals(low, high)) > 0, name, "must hold an odd length")
        self.require(self.length_range[1] >= self.least, "length_range", f"must end at {self.least} or above")
        self.require(self.test_range[0] >= self.least, "test_range", f"must begin at {self.least} or above")

    @property
    def length(self) -> int:
        return self.length_range[1] - 1

    @property
    def most_scored(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return 0.0

    def totals(self, low: int, high: int) -> range:
        """Returns the total lengths from `low` to `high` that the task has."""
        return range(low, high + 1)

    def evaluations(self) -> Mapping[str, Task]:
        low, high = self.length_range
        return {"": replace(self, length_range=self.test_range), f"{max(low, self.least)}-{high}": self}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        low, high = self.length_range
        totals = self.totals(low if split == "train" else max(low, self.least), high)
        total = totals.start + totals.step * random.integers("length", len(totals), size)
        tokens, answer = self.sequences(total, split, random)
        place, asked = torch.arange(self.length, device=random.device), total[:, None] - 2
        inputs = torch.where(place <= asked, tokens, self.padding)
        return Batch(inputs, torch.where(place == asked, answer[:, None], IGNORE))

    def measure(self, batch: Batch, logits: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        right = (logits.argmax(-1) == batch.labels).double()
        nats = surprisal(batch, logits).double()
        count, guess = nats.new_tensor(len(nats)), 1 / self.answers
        return {
            "scaled_accuracy": (((right - guess) / (1 - guess)).sum(), count),
            "loss": (nats.sum(), count),
        }
