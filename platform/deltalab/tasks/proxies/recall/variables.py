"""Variable tracking, after RULER: a value is passed on from variable to variable. Tests recall of what was recalled."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from deltalab.errors import unknown
from deltalab.tasks.proxies.recall.places import spread
from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task

LET, QUERY, FILLERS = 0, 1, 2
WIDTH = 3
"""The tokens of an assignment: LET, the variable, and what it gets."""
ASKS = ("value", "variables")


@dataclass(frozen=True, kw_only=True)
class Variables(Proxy):
    """Variable tracking of RULER in miniature: x1 = v, x2 = x1, ..., and what is the value of the last variable?

    A sequence is a haystack of uniform fillers with `chains` chains of h + 1 assignments, h = `hops`. A chain begins
    with LET x1 v and goes on with LET x(i+1) x(i), in this order. All variables and all values of a sequence differ,
    and the chains stand in one another in any way. The questions are, by `ask`:

    - `value`: QUERY x(h+1) for each chain, in random order, where the target is v.
    - `variables`: QUERY v x1 ... xh for one chain, where the targets from v on are x1 ... x(h+1).

    Tokens are LET 0, QUERY 1, then `fillers` fillers, `names` variables and `names` values. The metric is accuracy.
    `chance` is the accuracy of naming any value, or any variable, 1/`names`.

    What separates rules: a layer that reads by key makes one hop, so that attention needs about log2(h) layers (Sanford
    et al. 2024, arXiv:2402.09268). One recurrent layer passes a value on only if its transition moves content from one
    key to another. A decay does not. The I - beta k k^T of a delta rule does where k is the difference of two keys: at
    beta = 1, both names then hold half of the value.

    As in RULER: chains amid noise, all variables of one value. Different: one token for a name, uniform fillers, the
    order of the variables is that of the chain, and `value` asks the other way round.

    Attributes:
        length: The tokens of a sequence in training.
        chains: The number of chains.
        hops: h, the number of times that a value is passed on.
        ask: What is asked, `value` or `variables`.
        names: The number of tokens that can be variables, and of those that can be values.
        fillers: The number of tokens that can be fillers.
        times: The multiples of `length` at which validation and test are measured, each under the label of its length.
            The metric is over all.

    Raises:
        InputError: `ask` is another word, a number is below its least, `names` are too few, the length does not hold
            chains and questions, or `times` are empty or not distinct.

    Examples:
        >>> batch = Variables(length=20, chains=2, hops=1, names=4, fillers=2).batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[0, 6, 8, 2, 0, 4, 9, 3, 3, 0, 7, 4, 3, 0, 5, 6, 1, 7, 1, 5]])
        >>> batch.targets[:, -4:]
        tensor([[-100,    9, -100,    8]])

    References:
        Hsieh et al. 2024, arXiv:2404.06654.
    """

    name: ClassVar[str] = "ruler_variables"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 48, "chains": 3, "hops": 2, "names": 16}

    length: int = 96
    chains: int = 4
    hops: int = 2
    ask: str = "value"
    names: int = 32
    fillers: int = 16
    times: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ask not in ASKS:
            raise unknown("ask", self.ask, ASKS, where=f"task '{self.name}'")
        self.require(self.chains >= 2, "chains", "must be at least 2")
        self.require(self.hops >= 1, "hops", "must be at least 1")
        self.require(self.fillers >= 1, "fillers", "must be at least 1")
        lines = self._lines
        self.require(self.names >= lines, "names", f"must be at least chains x (hops + 1) = {lines}")
        least = WIDTH * lines + self._asked
        self.require(self.length >= least, "length", f"must be at least {least}, for chains and questions")
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")

    @property
    def _lines(self) -> int:
        return self.chains * (self.hops + 1)

    @property
    def _asked(self) -> int:
        return 2 * self.chains if self.ask == "value" else self.hops + 2

    @property
    def vocab_size(self) -> int:
        return FILLERS + self.fillers + 2 * self.names

    @property
    def most_scored(self) -> int:
        return self.chains if self.ask == "value" else self.hops + 1

    @property
    def chance(self) -> float:
        return 1 / self.names

    def evaluations(self) -> Mapping[str, Task]:
        return {str(n * self.length): replace(self, length=n * self.length, times=(1,)) for n in self.times}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        chains, links, lines = self.chains, self.hops + 1, self._lines
        first = FILLERS + self.fillers
        variables = first + random.distinct("variables", self.names, size, lines)
        values = first + self.names + random.distinct("values", self.names, size, chains)

        # A line belongs to a chain, and its link is the number of lines of the chain before it.
        chain = random.distinct("order", lines, size, lines) % chains
        same = chain[:, :, None] == torch.arange(chains, device=random.device)
        link = same.cumsum(1).gather(2, chain[:, :, None])[:, :, 0] - 1
        line = chain * links + link
        before = torch.where(link == 0, values.gather(1, chain), variables.gather(1, (line - 1).clamp(min=0)))

        at = spread(random, self.length - self._asked, WIDTH, size, lines)
        body = FILLERS + random.integers("fillers", self.fillers, size, self.length - self._asked)
        body = body.scatter(1, at, LET).scatter(1, at + 1, variables.gather(1, line)).scatter(1, at + 2, before)

        by_chain = variables.view(size, chains, links)
        if self.ask == "value":
            last = by_chain[:, :, -1]
            asked = torch.stack([torch.full_like(last, QUERY), last], dim=2).flatten(1)
            answers = torch.stack([torch.full_like(last, IGNORE), values], dim=2).flatten(1)
        else:
            asked = torch.cat([torch.full_like(chain[:, :1], QUERY), values[:, :1], by_chain[:, 0, :-1]], dim=1)
            answers = torch.cat([torch.full_like(chain[:, :1], IGNORE), by_chain[:, 0]], dim=1)
        return Batch(torch.cat([body, asked], dim=1), torch.cat([torch.full_like(body, IGNORE), answers], dim=1))
