"""MAD's memorization: facts that stand in no context. Tests what the weights keep, not the state."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.mad.task import MAD
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class Memorization(MAD):
    """Memorization of MAD.

    Each of K = (V - 1)//2 keys in [0, K) has its own value in [K, V - 1). The map from keys to values is the same in
    all sequences, splits and seeds. A sequence is L/2 keys, uniform in [0, K), and each key is followed by V - 1, at
    which the model is to name the key's value. 256 examples of L = 32 show each of 127 keys about 32 times. With a
    larger V, some keys may be missing.

    `chance` is the accuracy of naming the value of any key, 1/K.

    Attributes:
        length: L.
        vocab_size: V.

    Raises:
        InputError: L is odd or below 2, or V is below 4.

    Examples:
        >>> batch = Memorization(length=8).batch("test", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 65, 255,  68, 255,  13, 255,  26, 255]])
        >>> batch.targets
        tensor([[-100,  175, -100,  226, -100,  135, -100,  199]])
    """

    name: ClassVar[str] = "mad_memorization"
    version: ClassVar[int] = 1
    shortcuts: ClassVar[frozenset[str]] = frozenset({"facts"})

    length: int = 32
    vocab_size: int = 256
    train_examples: int | None = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 2 and self.length % 2 == 0, "length", "must be even and at least 2")
        self.require(self.vocab_size >= 4, "vocab_size", "must be at least 4")

    @property
    def most_scored(self) -> int:
        return self.length // 2

    @property
    def chance(self) -> float:
        return 1 / ((self.vocab_size - 1) // 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        insert = self.vocab_size - 1
        facts = _facts(f"{self.name}/{self.version}/facts", insert // 2, insert - insert // 2, random.device)
        keys = random.integers("keys", len(facts), size, self.length // 2)
        inputs = torch.full((size, self.length), insert, device=random.device)
        targets = torch.full_like(inputs, IGNORE)
        inputs[:, ::2] = keys
        targets[:, 1::2] = facts[keys]
        return Batch(inputs, targets)


@cache
def _facts(address: str, keys: int, values: int, device: torch.device) -> Tensor:
    """Returns the value of each key, [keys]."""
    return keys + Random(address, device).distinct("values", values, 1, keys)[0]
