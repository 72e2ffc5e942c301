"""MAD's in-context recall: which value did this key have? Tests how well a state is written and read by key."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.mad.task import MAD, first_use
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch


@dataclass(frozen=True, kw_only=True)
class InContextRecall(MAD):
    """In-context recall of MAD.

    A sequence is L/2 pairs k v k v ... Keys are uniform in [0, V/2), with replacement. A key's value is uniform in
    [V/2, V), and the same wherever the key stands in the sequence. The last key is uniform among those that stood
    before. Training scores every next token; validation and test score the values of keys that stood before.

    The authors leave the last token out of the inputs, as nothing follows it. Here it is an input without a target.

    `chance` is the accuracy of naming any value, 1/(V - V//2). Raises `InputError` unless L is even and at least 4, and
    V at least 4.

    >>> batch = InContextRecall(length=12, vocab_size=4).batch("test", 1, seed=0, step=0)
    >>> batch.inputs
    tensor([[0, 2, 1, 3, 1, 3, 1, 3, 1, 3, 0, 2]])
    >>> batch.targets
    tensor([[-100, -100, -100, -100,    3, -100,    3, -100,    3, -100,    2, -100]])
    """

    name: ClassVar[str] = "mad_in_context_recall"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 32}

    length: int = 128
    vocab_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 4 and self.length % 2 == 0, "length", "must be even and at least 4")
        self.require(self.vocab_size >= 4, "vocab_size", "must be at least 4")

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - self.vocab_size // 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        noise = torch.full((size, self.length // 2, 2), -1, device=random.device)
        return recall(split, random, self.vocab_size, noise)


def recall(split: str, random: Random, vocab_size: int, noise: Tensor) -> Batch:
    """A batch of `InContextRecall` from tokens [0, vocab_size), in which `noise [B, L/2, 2]` replaces pairs where it is
    not negative. The last pair must not be noise, nor all others at once."""
    size, pairs, _ = noise.shape
    half = vocab_size // 2
    is_noise = noise[..., 0] >= 0
    order = torch.arange(pairs, device=random.device)

    key = random.integers("keys", half, size, pairs)
    value = half + random.integers("values", vocab_size - half, size, half)
    # Noise gets an id of its own, which has never stood before.
    ids = torch.where(is_noise, half + order, key)
    stood = torch.zeros(size, half + pairs, dtype=torch.bool, device=random.device)
    found = stood.scatter_(1, ids[:, :-1], True)[:, :half].cumsum(dim=1)
    ids[:, -1:] = (found <= random.integers("last", found[:, -1:], size, 1)).sum(dim=1, keepdim=True)

    answer = value.gather(1, ids.clamp(max=half - 1))
    inputs = torch.where(is_noise[..., None], noise, torch.stack([ids, answer], dim=2)).flatten(1)
    targets = torch.full_like(inputs, IGNORE)
    if split == "train":
        targets[:, :-1] = inputs[:, 1:]
    else:
        targets[:, ::2] = torch.where(first_use(ids) < order, answer, IGNORE)
    return Batch(inputs, targets)
