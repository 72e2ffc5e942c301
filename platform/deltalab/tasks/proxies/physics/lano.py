"""Lano: strings of a context-free grammar of three symbols. Which start symbol do they come from?"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, reduce
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch

SYMBOLS = 3
"""The number of terminals, and of symbols of each level between them and the start."""
ASK, PADDING, STARTS = range(SYMBOLS, SYMBOLS + 3)
RULE_LENGTHS = (2, 3)
"""Each symbol has one rule of each of these lengths."""
MOST_STARTS = SYMBOLS**2
STRINGS = 400
"""The strings of which a parser finds all derivations, for `Lano.ceiling`; an eighth of them from 5 levels on."""


@dataclass(frozen=True, kw_only=True)
class Lano(Proxy):
    """Lano of *Physics of Language Models*, asked for its start: which start symbol is a string derived from?

    A grammar has `levels` levels of rules, from `starts` start symbols over levels of 3 symbols to 3 terminals. Each
    symbol has two rules, which replace it by 2 or by 3 symbols of the next level, and no two rules of a level have the
    same right side. A start symbol is drawn uniformly, and each symbol is replaced by one of its rules, uniformly. The
    string, the token ASK, whose target is the start symbol, and padding make a sequence. Terminals are 0 to 2, ASK is
    3, padding 4, and start symbols follow from 5 on.

    The metric is accuracy. `chance` is that of naming any start symbol, 1/`starts`. Noise: the same string may come
    from two start symbols. A parser of all derivations finds one start for each of 400 strings of grammar 0, so that
    the best accuracy that any model can have is 1 to within a percent. Grammar 1 has two starts for 3 strings in 100,
    and a ceiling of about 0.985. `ceiling` computes it for any grammar.

    What separates rules: where a symbol ends is locally ambiguous, since long runs of few terminals have many parses.
    Only the whole string settles it, so that a state must hold what is still possible at each level. A decay that
    forgets at a fixed rate loses the beginning of a string.

    As in the source: levels of few symbols, rules of 2 and 3 symbols, different right sides, strings without spaces.
    Different: the source scores next tokens against their exact distribution, which no input decides; here one answer
    that the string decides is scored. The grammar is drawn, not one of cfg3f to cfg3k.

    Attributes:
        levels: The number of levels of rules. A string has 2^levels to 3^levels terminals.
        starts: The number of start symbols.
        grammar: The number of the grammar.

    Raises:
        InputError: `levels` are outside of [1, 6], or `starts` outside of [2, 9].

    Examples:
        >>> batch = Lano(levels=2).batch("train", 1, seed=0, step=0)
        >>> batch.inputs, int(batch.targets[0, -2])
        (tensor([[0, 1, 1, 0, 1, 1, 2, 1, 3, 4]]), 5)

    References:
        Allen-Zhu 2025, Physics of Language Models: Part 4.1, ssrn.5240330, task Lano; Allen-Zhu and Li 2023,
        arXiv:2305.13673; github.com/facebookresearch/PhysicsLM4.
    """

    name: ClassVar[str] = "lano"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"levels": 4}

    levels: int = 4
    starts: int = 4
    grammar: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(1 <= self.levels <= 6, "levels", "must be between 1 and 6")
        self.require(2 <= self.starts <= MOST_STARTS, "starts", f"must be between 2 and {MOST_STARTS}")

    @property
    def length(self) -> int:
        return int(max(RULE_LENGTHS) ** self.levels) + 1

    @property
    def vocab_size(self) -> int:
        return STARTS + self.starts

    @property
    def most_scored(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return 1 / self.starts

    @property
    def ceiling(self) -> float:
        """The best accuracy, measured on `STRINGS` strings: the mean probability of the likeliest start of each."""
        return ceiling(self.grammar, self.levels, self.starts)

    def draw(self, split: str, size: int, random: Random) -> Batch:
        start = random.integers("start", self.starts, size, 1)
        string = start
        for level, rules in enumerate(tables(self.grammar, self.levels, self.starts, random.device)):
            rule = random.integers(f"level {level}", len(RULE_LENGTHS), *string.shape)
            parts = torch.where(string[:, :, None] >= 0, rules[string.clamp(min=0), rule], -1).flatten(1)
            string = parts.gather(1, (parts < 0).long().sort(dim=1, stable=True).indices)
        count = (string >= 0).sum(1, keepdim=True)
        string = torch.cat([torch.where(string < 0, PADDING, string), torch.full_like(start, PADDING)], dim=1)
        inputs = string.scatter(1, count, ASK)
        return Batch(inputs, torch.full_like(inputs, IGNORE).scatter(1, count, STARTS + start))


@cache
def tables(number: int, levels: int, starts: int, device: torch.device) -> list[Tensor]:
    """Returns the rules of each level, [symbols, 2, 3], with -1 at the end of a short rule.

    Args:
        number: The number of the grammar.
        levels: The number of levels.
        starts: The number of symbols of the first level.
        device: The device of the tables.
    """
    random, found = Random(f"lano grammar {number}", torch.device("cpu")), []
    for level in range(levels):
        count = starts if level == 0 else SYMBOLS
        sides = []
        for length in RULE_LENGTHS:
            every = [[*side, *[-1] * (max(RULE_LENGTHS) - length)] for side in product(range(SYMBOLS), repeat=length)]
            sides.append(torch.tensor(every)[random.distinct(f"level {level}/{length}", len(every), 1, count)[0]])
        found.append(torch.stack(sides, dim=1).to(device))
    return found


@cache
def ceiling(number: int, levels: int, starts: int) -> float:
    """Returns the mean probability of the likeliest start symbol of a string, by the inside algorithm.

    The probability that a symbol becomes what stands between two places of the string is the sum over its rules of
    1/2 times the product of those of the rule's parts, summed over the places where they meet.

    Args:
        number: The number of the grammar.
        levels: The number of levels.
        starts: The number of start symbols.
    """
    task = Lano(levels=levels, starts=starts, grammar=number)
    rules = [level.tolist() for level in reversed(tables(number, levels, starts, torch.device("cpu")))]
    likeliest = []
    count = STRINGS if levels < 5 else STRINGS // 8  # a string of 6 levels has up to 729 terminals
    for inputs in task.batch("test", count, seed=0, step=0).inputs:
        string = inputs[: int((inputs == ASK).nonzero())]
        inside = [torch.diag((string == symbol).double(), 1) for symbol in range(SYMBOLS)]
        for level in rules:
            inside = [
                sum(reduce(torch.matmul, [inside[part] for part in side if part >= 0]) for side in sides) / len(sides)
                for sides in level
            ]
        start = torch.stack([table[0, -1] for table in inside])
        likeliest.append(start.max() / start.sum())
    return round(float(torch.stack(likeliest).mean()), 3)
