"""Arithmetic modulo 5: the state must hold an intermediate value, and with brackets a stack of intermediate values."""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from deltalab.tasks.final_answer import OneAnswer
from deltalab.tasks.randomness import Random
from deltalab.tasks.splits import share_out, shared_from

MODULUS = 5
PLUS, MINUS, TIMES, EQUALS, PADDING, OPEN, CLOSE = range(MODULUS, MODULUS + 7)


@dataclass(frozen=True, kw_only=True)
class ModArithmetic(OneAnswer):
    """Modular arithmetic: an expression, then `=`, whose target is the value of the expression mod 5.

    A sequence of total length n has an expression of n - 2 tokens. Tokens are the digits 0 to 4, + 5, - 6, * 7, = 8,
    9 for padding, and with `brackets` also ( 10 and ) 11.

    Without brackets, uniform digits and operators alternate, * binds tighter than + and -, and n is odd.

    With `brackets`, an expression of 1 to 4 tokens is x, -x, (x) or (-x) with a uniform digit x. A longer expression is
    (A o B) with a uniform operator o. The length of A is uniform in [1, length - 4], and A and B are made in the same
    way.

    Lengths, evaluation and metric are those of `OneAnswer`. With `brackets`, products make 0 the most frequent value.
    `chance` is then the metric of always answering 0 at the lengths of `test_range`.

    A checksum of its digits decides whether an expression of 4 digits or more (n >= 9, with brackets n >= 21) belongs
    to training, validation or test (`share_out`).

    Attributes:
        brackets: Whether expressions have brackets.

    Examples:
        >>> task = ModArithmetic(length_range=(11, 11), test_range=(11, 41))
        >>> batch = task.batch("train", 1, seed=0, step=0)
        >>> "".join("01234+-*= ()"[token] for token in batch.inputs[0]), int(batch.targets[0, -1])
        ('3*1*3+3*3=', 3)

    References:
        Deletang et al. 2022, arXiv:2207.02098, for the expressions with brackets.
        Grazzi et al. 2024, arXiv:2411.12537, section 5.1, who train on lengths U[3, 40] and test on 8,192 sequences of
        lengths U[40, 256].
    """

    name: ClassVar[str] = "mod_arithmetic"
    version: ClassVar[int] = 1
    answers: ClassVar[int] = MODULUS
    padding: ClassVar[int] = PADDING

    brackets: bool = False

    @property
    def vocab_size(self) -> int:
        return 12 if self.brackets else 10

    @property
    def least(self) -> int:
        # A bracketed expression of d digits has at most 4 tokens per digit and 3 for each of its d - 1 operators.
        digits = shared_from(MODULUS)
        return 7 * (digits - 1) if self.brackets else 2 * digits + 1

    @property
    def chance(self) -> float:
        if not self.brackets:
            return 0.0
        totals = self.totals(*self.test_range)
        zeros = _zeros(totals[-1])
        accuracy = sum(zeros[total - 2] for total in totals) / len(totals)
        return (accuracy - 1 / MODULUS) / (1 - 1 / MODULUS)

    def totals(self, low: int, high: int) -> range:
        return range(low, high + 1) if self.brackets else range(low | 1, high + 1, 2)

    def sequences(self, total: Tensor, split: str, random: Random) -> tuple[Tensor, Tensor]:
        make = self._bracketed if self.brackets else self._flat
        expression, value = make(total - 2, split, random)
        tokens = functional.pad(expression, (0, 1))
        return tokens.scatter(1, total[:, None] - 2, EQUALS), value

    def _flat(self, length: Tensor, split: str, random: Random) -> tuple[Tensor, Tensor]:
        rows, width = len(length), self.length - 1
        count = (length + 1) // 2
        digits = random.integers("digits", MODULUS, rows, (width + 1) // 2)
        digits = share_out(digits, count, MODULUS, split, random)
        operators = PLUS + random.integers("operators", 3, rows, width // 2)
        tokens = digits.new_zeros(rows, width)
        tokens[:, 0::2], tokens[:, 1::2] = digits, operators

        # Each + and - begins a product. Every digit but 0 is a power of 2 mod 5, and so is -1 = 2^2. So a product is 0
        # if one of its digits is 0, and otherwise 2 to the sum of the exponents mod 4.
        power, logarithm = _powers(random.device)
        before = functional.pad(operators, (1, 0), value=PLUS)[:, : digits.shape[1]]
        product = (before != TIMES).long().cumsum(1) - 1
        used = torch.arange(digits.shape[1], device=digits.device) < count[:, None]
        exponent = logarithm[digits] + 2 * (before == MINUS)
        sums = torch.zeros_like(digits).scatter_add(1, product, torch.where(used, exponent, 0))
        zeros = torch.zeros_like(digits).scatter_add(1, product, (used & (digits == 0)).long())
        factors = torch.zeros_like(digits).scatter_add(1, product, used.long())
        values = torch.where((factors > 0) & (zeros == 0), power[sums % 4], 0)
        return tokens, values.sum(1) % MODULUS

    def _bracketed(self, length: Tensor, split: str, random: Random) -> tuple[Tensor, Tensor]:
        rows, width = len(length), self.length - 1
        place = torch.arange(width, device=random.device)
        # A and B are at least 4 tokens shorter than (A o B); (-x) adds two levels.
        levels = (width - 1) // 4 + 2

        # size[p] is the size of the part that begins at place p, or 0 if no part begins there. No two parts begin at
        # one place. Each round finds the parts inside the known parts: a part begins at p + 1, behind a bracket or a
        # sign, and in (A o B) there is also B.
        draw = random.integers("split", 2**62, rows, width)
        size = root = functional.pad(length[:, None], (0, width - 1))
        for _ in range(levels):
            a = _first(size, draw)
            size, b, at = root.clone(), torch.where(size >= 5, size - 3 - a, 0), place + 2 + a
            size[:, 1:] += a[:, :-1]
            size.scatter_add_(1, torch.where(b > 0, at, 0), b)
        a = _first(size, draw)
        joins, ends = size >= 5, size >= 3

        leaf = size == 1
        digits = random.integers("digits", MODULUS, rows, (width + 3) // 4)
        digits = share_out(digits, leaf.sum(1), MODULUS, split, random)
        digit = digits.gather(1, (leaf.cumsum(1) - 1).clamp(min=0))
        operator = PLUS + random.integers("operators", 3, rows, width)
        starts = torch.where(leaf, digit, torch.where(size == 2, MINUS, torch.where(ends, OPEN, 0)))
        closed = starts.scatter_add(1, torch.where(ends, place + size - 1, 0), torch.where(ends, CLOSE, 0))
        tokens = closed.scatter_add(1, torch.where(joins, place + 1 + a, 0), torch.where(joins, operator, 0))

        value, second = digit, torch.where(joins, place + 2 + a, 0)
        for _ in range(levels):
            x, y = value.roll(-1, 1), value.gather(1, second)
            joined = torch.where(operator == PLUS, x + y, torch.where(operator == MINUS, x - y, x * y))
            inner = torch.where(joins, joined, torch.where(size == 2, -x, x))
            value = torch.where(leaf, digit, inner % MODULUS)
        return tokens, value[:, 0]


@cache
def _zeros(longest: int) -> list[float]:
    """Returns the share of bracketed expressions whose value is 0, by length up to `longest`.

    The other values are equally frequent. So x + y and x - y are 0 with probability
    p_x p_y + (1 - p_x) (1 - p_y) / 4, and x y is 0 with probability 1 - (1 - p_x) (1 - p_y).
    """
    shares = [1 / MODULUS] * 5
    for length in range(5, longest + 1):
        parts = [(shares[a], shares[length - 3 - a]) for a in range(1, length - 3)]
        both_zero = sum(x * y for x, y in parts) / len(parts)
        neither_zero = sum((1 - x) * (1 - y) for x, y in parts) / len(parts)
        shares.append(2 / 3 * (both_zero + neither_zero / (MODULUS - 1)) + 1 / 3 * (1 - neither_zero))
    return shares


@cache
def _powers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns 2^0 to 2^3 mod 5, and the exponent of each digit, with a 0 for the digit 0, which has no exponent."""
    return torch.tensor([1, 2, 4, 3], device=device), torch.tensor([0, 0, 1, 3, 2], device=device)


def _first(size: Tensor, draw: Tensor) -> Tensor:
    """Returns the size of the first part inside each part, behind its bracket or sign; 0 if there is no part."""
    cut = 1 + draw % (size - 4).clamp(min=1)
    return torch.where(size >= 5, cut, torch.where(size >= 2, (size - 2).clamp(min=1), 0))
