"""Traces of programs that swap variables: which value does a variable print? Tests permutations in next-token form."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task

SET, SWAP, PRINT, NAMES = range(4)
WIDTH = 3
"""The tokens of a line."""
MILLE = 1000
"""The steps of the probability of a print."""


@dataclass(frozen=True, kw_only=True)
class ProgramTrace(Proxy):
    """A trace of a program on n = `variables` variables: name the value that a print shows.

    A line has three tokens. The first n lines SET x v give every variable x a value v, and all values differ. Then
    `lines` lines follow: with probability p = `reveal`, and always in the last line, PRINT x v for a uniform x, else
    SWAP x y for two uniform variables x and y. The target at x of a print is its value v, which is then an input.
    Tokens are SET 0, SWAP 1, PRINT 2, then n variables and n values.

    The metric is accuracy. `chance` is the accuracy of naming any value, 1/n. All answers are known, since the trace
    begins with all values: there is no noise.

    What separates rules: swaps generate the group S_n, whose word problem is NC1-complete from n = 5 on, out of reach
    for a fixed number of layers of attention or of diagonal transitions (Merrill et al. 2024, arXiv:2404.08819). One
    Householder step with an eigenvalue of -1 is one swap, so that a delta rule with beta in [0, 2] tracks it in one
    layer, where beta in [0, 1] does not (Grazzi et al. 2024, arXiv:2411.12537). With prints in between, the state may
    be read off the trace, but not all of it.

    As in Siems et al.: permutations as code, prints that reveal a part of the state, and longer traces in the test.
    Different: swaps are the only transformation, prints of one variable the only reveal, a name is one token, and only
    printed values are scored.

    Attributes:
        variables: n.
        lines: The number of lines after the first n, in training.
        reveal: p, which is rounded to a thousandth.
        times: The multiples of `lines` at which validation and test are measured, each under the label of its number of
            lines. The metric is over all.

    Raises:
        InputError: There are fewer than 3 variables or no line, p is outside of [0, 1), or `times` are empty, below 1
        or
            not distinct.

    Examples:
        >>> batch = ProgramTrace(variables=3, lines=2).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[0, 3, 7, 0, 4, 6, 0, 5, 8, 2, 5, 8, 2, 3, 7]])
        >>> int(batch.targets[0, -2])
        7

    References:
        Siems et al. 2026, Learning State-Tracking from Code Using Linear RNNs, arXiv:2602.14814.
    """

    name: ClassVar[str] = "program_trace"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"variables": 5, "lines": 12}

    variables: int = 5
    lines: int = 24
    reveal: float = 0.25
    times: tuple[int, ...] = (1, 2, 4)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.variables >= 3, "variables", "must be at least 3")
        self.require(self.lines >= 1, "lines", "must be at least 1")
        self.require(0 <= self.reveal < 1, "reveal", "must be at least 0 and below 1")
        self.require(len(self.times) > 0, "times", "must name a multiple of the lines")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")

    @property
    def length(self) -> int:
        return WIDTH * (self.variables + self.lines)

    @property
    def vocab_size(self) -> int:
        return NAMES + 2 * self.variables

    @property
    def most_scored(self) -> int:
        return self.lines

    @property
    def chance(self) -> float:
        return 1 / self.variables

    def evaluations(self) -> Mapping[str, Task]:
        return {str(n * self.lines): replace(self, lines=n * self.lines, times=(1,)) for n in self.times}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        n, first_value = self.variables, NAMES + self.variables
        values = first_value + random.distinct("values", n, size, n)
        x, y = random.distinct("swaps", n, size, self.lines, 2).unbind(2)
        prints = random.integers("prints", MILLE, size, self.lines) < round(MILLE * self.reveal)
        prints[:, -1] = True
        value = values.gather(1, _origin(x, torch.where(prints, x, y), n).gather(2, x[:, :, None])[:, :, 0])

        variable = torch.arange(n, device=random.device).expand(size, -1)
        start = torch.stack([torch.full_like(variable, SET), NAMES + variable, values], dim=2)
        kind, third = torch.where(prints, PRINT, SWAP), torch.where(prints, value, NAMES + y)
        inputs = torch.cat([start, torch.stack([kind, NAMES + x, third], dim=2)], dim=1).flatten(1)
        targets = torch.full_like(inputs, IGNORE)
        targets[:, WIDTH * n + 1 :: WIDTH] = torch.where(prints, value, IGNORE)
        return Batch(inputs, targets)


def _origin(x: Tensor, y: Tensor, variables: int) -> Tensor:
    """Returns which variable first had the value that each variable has after each line, [B, lines, variables].

    Args:
        x: A variable of each line, [B, lines].
        y: The variable that it is swapped with; x itself if nothing is swapped.
        variables: The number of variables.
    """
    variable = torch.arange(variables, device=x.device)
    x, y = x[:, :, None], y[:, :, None]
    origin = torch.where(variable == x, y, torch.where(variable == y, x, variable))
    # A round makes each line hold the swaps of the last 2 span lines up to the line.
    span = 1
    while span < origin.shape[1]:
        joined = origin[:, :-span].gather(2, origin[:, span:])
        origin, span = torch.cat([origin[:, :span], joined], dim=1), 2 * span
    return origin
