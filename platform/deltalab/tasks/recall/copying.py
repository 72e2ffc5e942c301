"""Copying of sequences that are longer than those of training."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task
from deltalab.tasks.token_accuracy import TokenAccuracy


@dataclass(frozen=True, kw_only=True)
class Copying(TokenAccuracy):
    """Copying, trained on up to n = `longest` tokens and evaluated at multiples of n.

    A sequence is x1 ... xl, the token V - 2, and x1 ... x(l-1), with targets x1 ... xl at the last l tokens. The x are
    uniform in [0, V - 2) with replacement. In training l is uniform in [n/2, n], and V - 1 fills the end. An
    evaluation has one l.

    A state of b bits copies at most b / log2(V - 2) tokens, whereas a transformer of two layers copies sequences that
    grow exponentially with its size (Jelassi et al. 2024, arXiv:2402.01032). What is found beyond n is whether a rule
    has learned to count to n, or to go on.

    `chance` is the accuracy of naming any token, 1/(V - 2).

    Attributes:
        longest: n.
        vocab_size: V.
        times: The multiples of n at which validation and test are measured, each under the label of its length. The
            metric is the mean over all tokens.
        one_length: Whether all sequences have n tokens, as those of an evaluation do.

    Raises:
        InputError: n is below 4, V is below 4, or `times` are empty, below 1 or not distinct.

    Examples:
        >>> task = Copying(longest=4, vocab_size=8, times=(1,))
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> batch.inputs, batch.targets
        (tensor([[5, 1, 3, 0, 6, 5, 1, 3]]), tensor([[-100, -100, -100, -100,    5,    1,    3,    0]]))
    """

    name: ClassVar[str] = "copying"
    version: ClassVar[int] = 1
    shortcuts: ClassVar[frozenset[str]] = frozenset({"distance"})  # of one length, copies have a fixed distance
    example: ClassVar[Mapping[str, object]] = {"longest": 12}

    longest: int = 32
    vocab_size: int = 32
    times: tuple[int, ...] = (1, 2, 4)
    one_length: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.longest >= 4, "longest", "must be at least 4")
        self.require(self.vocab_size >= 4, "vocab_size", "must be at least 4")
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")

    @property
    def length(self) -> int:
        return 2 * self.longest

    @property
    def most_scored(self) -> int:
        return self.longest

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def evaluations(self) -> Mapping[str, Task]:
        if self.one_length:
            return {"": self}
        return {
            f"{self.longest * n}": replace(self, longest=self.longest * n, times=(1,), one_length=True)
            for n in self.times
        }

    def draw(self, split: str, size: int, random: Random) -> Batch:
        most = self.longest
        data = random.integers("data", self.vocab_size - 2, size, most)
        shortest = most if self.one_length else most // 2
        count = (shortest + random.integers("length", most - shortest + 1, size))[:, None]
        place = torch.arange(self.length, device=random.device).expand(size, -1)
        copied = data.gather(1, (place - count - 1).clamp(0, most - 1))
        inputs = torch.where(place < count, data.gather(1, place.clamp(max=most - 1)), copied)
        inputs = torch.where(place == count, self.vocab_size - 2, inputs)
        inputs = torch.where(place >= 2 * count, self.vocab_size - 1, inputs)
        answers = data.gather(1, (place - count).clamp(0, most - 1))
        return Batch(inputs, torch.where((place >= count) & (place < 2 * count), answers, IGNORE))
