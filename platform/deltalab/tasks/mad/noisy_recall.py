"""MAD's noisy recall: in-context recall among meaningless pairs. Tests whether a state can leave things out."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from deltalab.tasks.mad.in_context_recall import recall
from deltalab.tasks.mad.task import MAD
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import Batch


@dataclass(frozen=True, kw_only=True)
class NoisyRecall(MAD):
    """Noisy in-context recall of MAD.

    The task is `mad_in_context_recall` over the first U = V - `noise_vocab` tokens, with noise. Each pair but the last
    is replaced, with probability `noise`, by two tokens uniform in [U, V). One of these pairs, chosen uniformly, is
    always kept. The authors' code may keep the last pair instead, and then fails if all others are noise.

    `chance` is the accuracy of naming any value, 1/(U - U//2).

    Attributes:
        length: L.
        vocab_size: V.
        noise_vocab: The number of tokens that are noise.
        noise: The probability at which a pair is replaced.

    Raises:
        InputError: L is odd or below 4, U is below 4, `noise_vocab` is below 1, or `noise` is not in [0, 1).

    Examples:
        >>> batch = NoisyRecall(length=12, vocab_size=8, noise_vocab=4, noise=0.4).batch("test", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[1, 2, 1, 2, 4, 5, 4, 7, 1, 2, 1, 2]])
        >>> batch.targets
        tensor([[-100, -100,    2, -100, -100, -100, -100, -100,    2, -100,    2, -100]])
    """

    name: ClassVar[str] = "mad_noisy_recall"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 32}

    length: int = 128
    vocab_size: int = 32
    noise_vocab: int = 16
    noise: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 4 and self.length % 2 == 0, "length", "must be even and at least 4")
        self.require(self.noise_vocab >= 1, "noise_vocab", "must be at least 1")
        least = self.noise_vocab + 4
        self.require(self.vocab_size >= least, "vocab_size", f"must be at least noise_vocab + 4 = {least}")
        self.require(0 <= self.noise < 1, "noise", "must be at least 0 and below 1")

    @property
    def chance(self) -> float:
        used = self.vocab_size - self.noise_vocab
        return 1 / (used - used // 2)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        pairs, used = self.length // 2, self.vocab_size - self.noise_vocab
        # Compare integers: a threshold in floating point may round differently on another device.
        replaced = random.integers("replaced", 2**53, size, pairs) < round(self.noise * 2**53)
        replaced.scatter_(1, random.integers("spared", pairs - 1, size, 1), False)
        replaced[:, -1] = False
        noise = used + random.integers("noise", self.noise_vocab, size, pairs, 2)
        return recall(split, random, used, torch.where(replaced[..., None], noise, -1))
