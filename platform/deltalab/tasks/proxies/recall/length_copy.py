"""Copying beyond the training length: the state must hold the whole string, and find where it stands in it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task


@dataclass(frozen=True, kw_only=True)
class LengthCopy(Proxy):
    """Copying: x1 ... xn COPY x1 ... x(n-1), where the targets from COPY on are x1 ... xn.

    Strings of training have a length n that is uniform in `lengths`, both ends included, and uniform symbols from
    [0, `symbols`). COPY is `symbols`, and `symbols` + 1 fills the rest. Strings of validation and test have the length
    L, 2L and 4L for L = `lengths[1]` and the default `times`, each under the label of its length.

    The metric is accuracy over all of them. `chance` is the accuracy of naming any symbol, 1/`symbols`.

    What separates rules: a state of b bits cannot hold a string of more than b / log2(symbols) symbols, whatever the
    rule, while two layers of attention copy strings of exponential length by looking up the last few symbols (Jelassi
    et al. 2024, arXiv:2402.01032). Positions that training did not show hurt attention.

    As in Jelassi et al.: uniform strings, the copy after a token of its own, longer strings in the test. Different:
    accuracy is by symbol, not by string.

    Attributes:
        lengths: The least and the greatest number of symbols in training.
        symbols: The number of symbols.
        times: The multiples of `lengths[1]` at which validation and test are measured.

    Raises:
        InputError: `lengths` begin below 1 or end before they begin, there are fewer than 2 symbols, or `times` are
            empty, below 1 or not distinct.

    Examples:
        >>> batch = LengthCopy(lengths=(2, 4), symbols=3).batch("train", 1, seed=0, step=0)
        >>> batch.inputs, batch.targets
        (tensor([[1, 0, 1, 3, 1, 0, 4, 4]]), tensor([[-100, -100, -100,    1,    0,    1, -100, -100]]))

    References:
        Jelassi et al. 2024, arXiv:2402.01032.
    """

    name: ClassVar[str] = "length_copy"
    version: ClassVar[int] = 1
    shortcuts: ClassVar[frozenset[str]] = frozenset({"distance"})
    example: ClassVar[Mapping[str, object]] = {"lengths": [4, 16]}

    lengths: tuple[int, int] = (8, 32)
    symbols: int = 26
    times: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.lengths
        self.require(low >= 1, "lengths", "must begin at 1 or above")
        self.require(low <= high, "lengths", "must not end before they begin")
        self.require(self.symbols >= 2, "symbols", "must be at least 2")
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")

    @property
    def length(self) -> int:
        return 2 * self.lengths[1]

    @property
    def vocab_size(self) -> int:
        return self.symbols + 2

    @property
    def most_scored(self) -> int:
        return self.lengths[1]

    @property
    def chance(self) -> float:
        return 1 / self.symbols

    def evaluations(self) -> Mapping[str, Task]:
        ends = (n * self.lengths[1] for n in self.times)
        return {str(end): replace(self, lengths=(end, end), times=(1,)) for end in ends}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        low, high = self.lengths
        count = low + random.integers("length", high - low + 1, size, 1)
        string = random.integers("symbols", self.symbols, size, high)
        place = torch.arange(self.length, device=random.device).expand(size, -1)
        copied = string.gather(1, (place - count - 1).clamp(0, high - 1))
        inputs = torch.where(place < count, string.repeat(1, 2), torch.where(place == count, self.symbols, copied))
        answers = string.gather(1, (place - count).clamp(0, high - 1))
        scored = (place >= count) & (place < 2 * count)
        inputs = torch.where(place < 2 * count, inputs, self.symbols + 1)
        return Batch(inputs, torch.where(scored, answers, IGNORE))
