"""RULER's variable tracking: names that stand for names that stand for a value."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch
from deltalab.tasks.token_accuracy import TokenAccuracy


@dataclass(frozen=True, kw_only=True)
class VariableTracking(TokenAccuracy):
    """Chains of assignments, of which the values of some variables are asked.

    There are c = `chains` of h = `hops` + 1 assignments each. Those of a chain are x0 v, x1 x0, x2 x1, ..., in this
    order, and the chains are interleaved in any way. All names are different, and uniform in [2, 2 + `names`); the
    values v are different, and uniform among the `values` tokens after them. An assignment is two tokens. Filler 0
    follows, then the token 1, and one variable of each chain, uniform among its h, in any order of the chains. Each
    variable has the value of its chain as its target.

    The step S_t = (I + k_x1 k_x0^T) S_{t-1} copies the value of x0 to x1. A free low rank has it, so that one layer
    follows a chain of any length. A decay, a sum and a tied low rank write only what the token says: they have to
    follow a chain by their layers, as attention does, which takes a layer for each doubling of the hops (Sanford et al.
    2024, arXiv:2402.09268, for k-hop induction heads).

    `chance` is the accuracy of naming any value, 1 / `values`. Naming any value of the context has the accuracy 1/c.

    Attributes:
        length: The tokens of a sequence.
        chains: c.
        hops: h - 1, the assignments from a name to a name in each chain.
        names: The number of names.
        values: The number of values.

    Raises:
        InputError: A number is below 1, or there are fewer tokens, names or values than the chains need.

    Examples:
        >>> task = VariableTracking(length=16, chains=2, hops=2, names=8, values=4)
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> batch.inputs
        tensor([[ 3, 11,  7,  3,  6,  7,  4, 13,  5,  4,  2,  5,  0,  1,  4,  6]])
        >>> batch.targets[0, -2:]
        tensor([13, 11])

    References:
        Hsieh et al. 2024, arXiv:2404.06654. RULER asks for all names that have a value, in words.
    """

    name: ClassVar[str] = "variable_tracking"
    version: ClassVar[int] = 1

    length: int = 64
    chains: int = 4
    hops: int = 3
    names: int = 64
    values: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("chains", "hops"):
            self.require(getattr(self, name) >= 1, name, "must be at least 1")
        count = self.chains * (self.hops + 1)
        least = 2 * count + 1 + self.chains
        self.require(self.length >= least, "length", f"must be at least 2 x chains x (hops + 1) + chains + 1 = {least}")
        self.require(self.names >= count, "names", f"must be at least chains x (hops + 1) = {count}")
        self.require(self.values >= max(2, self.chains), "values", f"must be at least {max(2, self.chains)}")

    @property
    def vocab_size(self) -> int:
        return 2 + self.names + self.values

    @property
    def most_scored(self) -> int:
        return self.chains

    @property
    def chance(self) -> float:
        return 1 / self.values

    def draw(self, split: str, size: int, random: Random) -> Batch:
        chains, steps = self.chains, self.hops + 1
        count = chains * steps
        names = 2 + random.distinct("names", self.names, size, count).view(size, chains, steps)
        values = 2 + self.names + random.distinct("values", self.values, size, chains)
        sources = torch.cat([values[:, :, None], names[:, :, :-1]], dim=2)
        # The chain of each place; the assignments of a chain keep their order.
        chain = random.distinct("order", count, size, count) // steps
        place = chain.sort(dim=1, stable=True).indices
        inputs = torch.zeros(size, self.length, dtype=torch.int64, device=random.device)
        inputs.scatter_(1, 2 * place, names.flatten(1)).scatter_(1, 2 * place + 1, sources.flatten(1))
        order = random.distinct("chains", chains, size, chains)
        depth = random.integers("depth", steps, size, chains)
        asked = names.gather(1, order[:, :, None].expand(-1, -1, steps)).gather(2, depth[:, :, None])[:, :, 0]
        inputs[:, -chains - 1] = 1
        inputs[:, -chains:] = asked
        targets = torch.full_like(inputs, IGNORE)
        targets[:, -chains:] = values.gather(1, order)
        return Batch(inputs, targets)
