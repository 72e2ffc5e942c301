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

    A sequence is L/2 pairs of a key and a value, k v k v ... Keys are uniform in [0, V/2), with replacement. The value
    of a key is uniform in [V/2, V), and the same wherever the key stands in the sequence. The last key is uniform among
    the keys that stood before. Training scores every next token. Validation and test score the values of keys that
    stood before. The authors leave the last token out of the inputs, because nothing follows it. Here it is an input
    without a target.

    `chance` is the accuracy of naming any value, 1/(V - V//2).

    Attributes:
        length: L.
        vocab_size: V.

    Raises:
        InputError: L is odd or below 4, or V is below 4.

    Examples:
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
    """Draws a batch of `InContextRecall` from tokens [0, vocab_size), with noise in place of some pairs.

    Args:
        split: The split.
        random: The random numbers.
        vocab_size: V.
        noise: The pairs that replace others, [B, L/2, 2]; negative for a pair that stays. The last pair stays, and at
            least one of the others does.
    """
    size, pairs, _ = noise.shape
    half = vocab_size // 2
    is_noise = noise[..., 0] >= 0
    order = torch.arange(pairs, device=random.device)

    key = random.integers("keys", half, size, pairs)
    value = half + random.integers("values", vocab_size - half, size, half)
    # Each noise gets an id of its own, which has never stood before.
    ids = torch.where(is_noise, half + order, key)
    stood = torch.zeros(size, half + pairs, dtype=torch.bool, device=random.device)
    distinct_keys = stood.scatter_(1, ids[:, :-1], True)[:, :half].cumsum(dim=1)
    ids[:, -1:] = (distinct_keys <= random.integers("last", distinct_keys[:, -1:], size, 1)).sum(dim=1, keepdim=True)

    answer = value.gather(1, ids.clamp(max=half - 1))
    inputs = torch.where(is_noise[..., None], noise, torch.stack([ids, answer], dim=2)).flatten(1)
    targets = torch.full_like(inputs, IGNORE)
    if split == "train":
        targets[:, :-1] = inputs[:, 1:]
    else:
        targets[:, ::2] = torch.where(first_use(ids) < order, answer, IGNORE)
    return Batch(inputs, targets)
