"""MAD's selective copy: repeat tokens in order, without the blanks among them. Tests whether a state keeps order."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from deltalab.tasks.mad.task import MAD
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class SelectiveCopy(MAD):
    """Selective copying of MAD.

    A sequence has n = `copies` data tokens, uniform in [0, V - 2) with replacement, and L - 2n - 1 blanks V - 2 among
    them, each before a uniformly chosen data token. The copy token V - 1 and n blanks follow. At these blanks the model
    is to name the data tokens in order.

    `chance` is the accuracy of naming any data token, 1/(V - 2).

    Attributes:
        length: L.
        vocab_size: V.
        copies: n.

    Raises:
        InputError: n is below 1, L below 2n + 2, or V below 4.

    Examples:
        >>> batch = SelectiveCopy(length=12, vocab_size=8, copies=3).batch("test", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[4, 6, 6, 3, 6, 6, 6, 5, 7, 6, 6, 6]])
        >>> batch.targets
        tensor([[-100, -100, -100, -100, -100, -100, -100, -100, -100,    4,    3,    5]])
    """

    name: ClassVar[str] = "mad_selective_copy"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "copies": 8}

    length: int = 256
    vocab_size: int = 16
    copies: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.copies >= 1, "copies", "must be at least 1")
        least = 2 * self.copies + 2
        self.require(self.length >= least, "length", f"must be at least 2 x copies + 2 = {least}")
        self.require(self.vocab_size >= 4, "vocab_size", "must be at least 4")

    @property
    def most_scored(self) -> int:
        return self.copies

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        blank, count = self.vocab_size - 2, self.copies
        data = random.integers("data", blank, size, count)
        next_data = random.integers("blanks", count, size, self.length - 2 * count - 1)
        blanks = torch.zeros_like(data).scatter_add_(1, next_data, torch.ones_like(next_data))
        place = torch.arange(count, device=random.device) + blanks.cumsum(dim=1)
        inputs = torch.full((size, self.length), blank, device=random.device).scatter_(1, place, data)
        inputs[:, -count - 1] = self.vocab_size - 1
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -count:] = data
        return Batch(inputs, targets)
