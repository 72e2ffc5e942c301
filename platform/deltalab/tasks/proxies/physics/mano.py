"""Mano: arithmetic mod 23 in prefix form. The tables are knowledge in the weights, and the state holds a stack."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.tasks.proxies.task import Proxy
from deltalab.tasks.randomness import Random
from deltalab.tasks.task import IGNORE, Batch, Task

MODULUS = 23
PLUS, MINUS, TIMES, EQUALS, PADDING, COUNTS = range(MODULUS, MODULUS + 6)


@dataclass(frozen=True, kw_only=True)
class Mano(Proxy):
    """Mano of *Physics of Language Models*: the value of an expression in prefix form, mod 23.

    A sequence is a token for the number l of operations, the expression, and =, whose target is the value. An
    expression with l = 0 is a uniform digit. Otherwise it is o A B with o uniform among +, - and *, where A has m
    operations, uniform in 0 ... l - 1, and B has l - 1 - m. In training, l is uniform in `operations`, both ends
    included. In validation and test, l is the greatest. Tokens are the digits 0 to 22, + 23, - 24, * 25, = 26, 27 for
    padding, and 28 + l.

    The metric is accuracy. Products make 0 the most frequent value. `chance` is the accuracy of always answering 0.

    What separates rules: a linear update with a positive diagonal decay does not multiply the values that it holds, so
    that the tables sit in the MLPs and l operations need about as many layers as the expression is deep. Nonlinear
    states can run the stack in one layer. Nested expressions of unbounded depth are NC1-complete (Buss 1987), beyond a
    fixed number of layers of attention or diagonal recurrences (Merrill et al. 2024, arXiv:2404.08819).

    As in the source: the expressions, mod 23, their length as a token, training on l up to a greatest and evaluation at
    the greatest. Different: l begins at 2, because there are only 1,587 expressions with one operation, and only the
    value is scored, since no input tells the other tokens.

    Attributes:
        operations: The least and the greatest number of operations in training.

    Raises:
        InputError: `operations` begin below 1, or end before they begin.

    Examples:
        >>> batch = Mano(operations=(2, 2)).batch("train", 1, seed=0, step=0)
        >>> batch.inputs, int(batch.targets[0, -1])
        (tensor([[30, 25, 14, 25, 15, 11, 26]]), 10)

    References:
        Allen-Zhu 2025, Physics of Language Models: Part 4.1, ssrn.5240330, task Mano; github.com/facebookresearch/
        PhysicsLM4.
    """

    name: ClassVar[str] = "mano"
    version: ClassVar[int] = 1
    example: ClassVar[Mapping[str, object]] = {"operations": [2, 4]}

    operations: tuple[int, int] = (2, 6)

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.operations
        self.require(low >= 1, "operations", "must begin at 1 or above")
        self.require(low <= high, "operations", "must not end before they begin")

    @property
    def length(self) -> int:
        return 2 * self.operations[1] + 3

    @property
    def vocab_size(self) -> int:
        return COUNTS + self.operations[1] + 1

    @property
    def most_scored(self) -> int:
        return 1

    @property
    def chance(self) -> float:
        return _zeros(self.operations[1])[-1]

    def evaluations(self) -> Mapping[str, Task]:
        return {"": replace(self, operations=(self.operations[1], self.operations[1]))}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        low, high = self.operations
        count = low + random.integers("count", high - low + 1, size, 1)
        cut = random.integers("cut", 2**62, size, 2 * high + 1)
        operator = PLUS + random.integers("operators", 3, size, 2 * high + 1)
        digit = random.integers("digits", MODULUS, size, 2 * high + 1)
        sizes = _sizes(count, cut)
        inner = torch.where(sizes > 0, operator, digit)
        value = _value(torch.where(sizes < 0, PADDING, inner))

        body = torch.cat([torch.where(sizes < 0, PADDING, inner), torch.full_like(count, PADDING)], dim=1)
        inputs = torch.cat([COUNTS + count, body.scatter(1, 2 * count + 1, EQUALS)], dim=1)
        return Batch(inputs, torch.full_like(inputs, IGNORE).scatter(1, 2 * count + 2, value))


def _sizes(count: Tensor, cut: Tensor) -> Tensor:
    """Returns the number of operations of the part that begins at each place, -1 behind the end, [B, places].

    A stack holds the sizes of the parts that are to come.

    Args:
        count: The number of operations, [B, 1].
        cut: A random number for each place, which cuts the part that begins there, [B, places].
    """
    places = cut.shape[1]
    stack = torch.zeros_like(cut).scatter(1, torch.zeros_like(count), count)
    top, sizes = torch.zeros_like(count), []
    for place in range(places):
        size = torch.where(top < 0, -1, stack.gather(1, top.clamp(min=0)))
        left = cut[:, place : place + 1] % size.clamp(min=1)
        stack = stack.scatter(1, top.clamp(min=0), size - 1 - left).scatter(1, (top + 1).clamp(max=places - 1), left)
        top = torch.where(size > 0, top + 1, (top - 1).clamp(min=-1))
        sizes.append(size)
    return torch.cat(sizes, dim=1)


def _value(tokens: Tensor) -> Tensor:
    """Returns the value of each row's expression, [B, 1]. It is read from its end, with a stack of values.

    Examples:
        >>> _value(torch.tensor([[MINUS, 1, TIMES, 2, 3, PADDING, PADDING]]))
        tensor([[18]])
    """
    stack, top = torch.zeros_like(tokens), torch.full_like(tokens[:, :1], -1)
    for place in reversed(range(tokens.shape[1])):
        token = tokens[:, place : place + 1]
        joins = (token >= PLUS) & (token <= TIMES)
        x, y = (stack.gather(1, (top - i).clamp(min=0)) for i in (0, 1))
        joined = torch.where(token == PLUS, x + y, torch.where(token == MINUS, x - y, x * y)) % MODULUS
        top = torch.where(joins, top - 1, torch.where(token < MODULUS, top + 1, top))
        value = torch.where(joins, joined, torch.where(token < MODULUS, token, 0))
        stack = stack.scatter(1, top.clamp(min=0), value)
    return stack[:, :1]


@cache
def _zeros(most: int) -> list[float]:
    """Returns the share of expressions whose value is 0, by the number of operations up to `most`.

    The other values are equally frequent. So x + y and x - y are 0 with probability
    p_x p_y + (1 - p_x) (1 - p_y) / 22, and x y is 0 with probability 1 - (1 - p_x) (1 - p_y).
    """
    shares = [1 / MODULUS]
    for count in range(1, most + 1):
        parts = [(shares[m], shares[count - 1 - m]) for m in range(count)]
        both = sum(x * y for x, y in parts) / count
        neither = sum((1 - x) * (1 - y) for x, y in parts) / count
        shares.append(2 / 3 * (both + neither / (MODULUS - 1)) + 1 / 3 * (1 - neither))
    return shares
