"""A grammar with ambiguous symbols and gaps, after SelectivBench: which state is the symbol from, and does it count?"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task

MILLE = 1000
"""The steps of the probability of a gap."""


@dataclass(frozen=True, kw_only=True)
class Selectiv(Proxy):
    """An artificial grammar of SelectivBench in miniature: name the state that a symbol stands for.

    The grammar has S = `symbols` symbols and `copies` states (s, c) for each symbol s. From a state (s, c), `branches`
    symbols are legal, each of which leads to one state: branch b goes from (s, c) to (s + d(b, c) mod S, p_b(c)), with
    fixed random numbers d, different for each b, and fixed random permutations p_b. So the symbols so far decide the
    state. A sequence begins with a token that names its state. Then, with probability p = `gap`, comes a symbol that is
    illegal in the present state, uniform among those, and changes nothing; else a uniform branch is taken. The target
    at each legal symbol is the state that it leads to. Tokens are S symbols, then S x `copies` states (S + s copies +
    c).

    The metric is accuracy over legal symbols. All states are equally frequent, and `chance` is that of naming any
    state, 1/(S copies). Naming any state of the symbol has 1/copies. There is no noise: the symbols so far decide what
    is a gap.

    What separates rules: whether a symbol counts depends on the state, so that a gate that reads the token alone cannot
    close itself at gaps. Such a rule must find the state in earlier layers. The paper finds that gates help recall, and
    that mixing of channels in the state matters for generalization but not for selectivity.

    As in SelectivBench: ambiguous symbols, gaps of symbols that break the rules, classification of the hidden state.
    Different: transitions have a regular form, which makes all states equally frequent; gaps are one symbol each; all
    branches are equally likely; sequences have one length.

    Attributes:
        length: The tokens of a sequence in training.
        symbols: S.
        copies: The number of states of a symbol.
        branches: The number of legal symbols of a state.
        gap: p, which is rounded to a thousandth.
        grammar: The number of the grammar.
        times: The multiples of `length` at which validation and test are measured, each under the label of its length.
            The metric is over all.

    Raises:
        InputError: A number is below its least, `branches` are not below S, p is outside of [0, 1), or `times` are
        empty,
            below 1 or not distinct.

    Examples:
        >>> batch = Selectiv(length=8, symbols=4, copies=2, branches=2).batch("train", 1, seed=0, step=0)
        >>> batch.inputs, batch.targets
        (tensor([[9, 0, 3, 3, 1, 1, 0, 2]]), tensor([[-100,    4,   11,   11,    6,    6,    5,    8]]))

    References:
        Bouhadjar et al. 2026, Dissecting Linear Recurrent Models, arXiv:2601.12598, and its code,
        github.com/symseqbench/ selectivbench.
    """

    name: ClassVar[str] = "selectiv"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"length": 32}

    length: int = 64
    symbols: int = 6
    copies: int = 8
    branches: int = 3
    gap: float = 0.2
    grammar: int = 0
    times: tuple[int, ...] = (1, 2)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.length >= 2, "length", "must be at least 2")
        self.require(self.copies >= 1, "copies", "must be at least 1")
        self.require(self.branches >= 2, "branches", "must be at least 2")
        self.require(self.symbols > self.branches, "symbols", f"must be above branches = {self.branches}")
        self.require(0 <= self.gap < 1, "gap", "must be at least 0 and below 1")
        self.require(len(self.times) > 0, "times", "must name a multiple of the length")
        self.require(min(self.times) >= 1, "times", "must all be at least 1")
        self.require(len(set(self.times)) == len(self.times), "times", "must all be different")

    @property
    def vocab_size(self) -> int:
        return self.symbols * (1 + self.copies)

    @property
    def chance(self) -> float:
        return 1 / (self.symbols * self.copies)

    def evaluations(self) -> Mapping[str, Task]:
        return {str(n * self.length): replace(self, length=n * self.length, times=(1,)) for n in self.times}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        steps, symbols, copies = self.length - 1, self.symbols, self.copies
        shifts, moves = grammar(self.grammar, symbols, copies, self.branches, random.device)
        start = random.integers("start", symbols * copies, size, 1)
        is_gap = random.integers("gaps", MILLE, size, steps) < round(MILLE * self.gap)
        branch = random.integers("branches", self.branches, size, steps)
        other = random.integers("others", symbols - self.branches, size, steps)

        # copy[t] is the copy after step t: all steps so far, one after the other, from the copy of the start.
        step = torch.where(is_gap[:, :, None], torch.arange(copies, device=random.device), moves[branch])
        span = 1
        while span < steps:
            joined = step[:, span:].gather(2, step[:, :-span])
            step, span = torch.cat([step[:, :span], joined], dim=1), 2 * span
        copy = step.gather(2, (start % copies).expand(-1, steps)[:, :, None])[:, :, 0]
        before = torch.cat([start % copies, copy[:, :-1]], dim=1)

        legal = shifts[before, branch]
        symbol = (start // copies + torch.where(is_gap, 0, legal).cumsum(1)) % symbols
        shown = (torch.cat([start // copies, symbol[:, :-1]], dim=1) + shifts[before, self.branches + other]) % symbols
        inputs = torch.cat([symbols + start, torch.where(is_gap, shown, symbol)], dim=1)
        state = symbols + symbol * copies + copy
        return Batch(inputs, torch.cat([torch.full_like(start, IGNORE), torch.where(is_gap, IGNORE, state)], dim=1))


@cache
def grammar(number: int, symbols: int, copies: int, branches: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns a grammar, which is the same for all seeds and splits.

    Args:
        number: The number of the grammar.
        symbols: S.
        copies: The number of states of a symbol.
        branches: The number of legal symbols of a state.
        device: The device of the tables.

    Returns:
        The steps to other symbols from each copy, [copies, S], of which the first `branches` are legal and the others
        are
            not, and the copy to which each branch leads, [branches, copies].
    """
    random = Random(f"selectiv grammar {number}", torch.device("cpu"))
    shifts = random.distinct("shifts", symbols, copies, symbols)
    moves = random.distinct("moves", copies, branches, copies)
    return shifts.to(device), moves.to(device)
