"""What a layer holds between calls, and how much that is."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from deltalab.rule import State


class CacheSize(NamedTuple):
    """The elements that a layer or a model holds between tokens, by what they are for.

    Attributes:
        recurrent: The state of the rule and its carry, as far as no token makes them larger.
        kv: The parts of the rule's state that begin empty and grow with the tokens, such as the keys and values of
            attention. A window ends their growth.
        conv: The inputs that convolutions and token shifts read again, and the number of tokens that RoPE counts.

    A module that does not say what it holds has a `recurrent` of NaN.
    """

    recurrent: float
    kv: int
    conv: int

    @property
    def state(self) -> float:
        """The elements of the rule's memory, without the inputs that the layer keeps around the rule."""
        return self.recurrent + self.kv

    @classmethod
    def summed(cls, sizes: "Iterable[CacheSize]") -> "CacheSize":
        """Returns the sum of sizes.

        Examples:
            >>> CacheSize.summed([CacheSize(1, 2, 3), CacheSize(1, 0, 1)])
            CacheSize(recurrent=2, kv=2, conv=4)
        """
        return cls(*map(sum, zip((0, 0, 0), *sizes, strict=True)))


@dataclass(frozen=True)
class LayerCache:
    """The memory of a layer between calls, for B sequences.

    Attributes:
        conv: The last inputs of the convolution, [B, conv - 1, C]; with a canon layer before it, 3 more.
        state: The state of the rule. In a layer that `keeps_latents`, the rows of `Latent.rows`, [B, 1, n, r + S].
        place: The number of tokens that were read, [B, 1] with RoPE and [B, 0] without.
        last: The x of the last token, [B, 1, d] with token shift and [B, 0, d] without.
        apart: The state of each sequence, if the states differ in size, as those of attention do after sequences of
            several lengths. `state` is then empty.
        tails: The last inputs of what the block has around its mixer: of each canon layer, in the order of
            `Block.canon`, [B, W - 1, C], and of an MLP with token shift, [B, 1, d].
        beside: The memory of the second mixer of the block, if there is one.
        balance: The balance loss of the block's experts on the tokens just read, []; None if there is none. It is no
            memory: nothing reads it later.
        values: The values [B, n T, H, V] of the tokens just read, if the layer `gives_values`. They are no memory.
    """

    conv: Tensor
    state: State
    place: Tensor
    last: Tensor
    apart: tuple[State, ...] = ()
    tails: tuple[Tensor, ...] = ()
    beside: "LayerCache | None" = None
    balance: Tensor | None = None
    values: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that the memory consists of."""
        own = [self.conv, *self.state, self.place, self.last, *sum(self.apart, ()), *self.tails]
        return own if self.beside is None else own + self.beside.tensors()

    def numel(self) -> int:
        """Returns the number of elements in these tensors."""
        return sum(tensor.numel() for tensor in self.tensors())

    def mapped(self, function: Callable[[Any], Any]) -> "LayerCache":
        """Returns the memory with function(x) in place of each tensor x. `balance` and `values` are no memory."""
        conv, place, last = map(function, (self.conv, self.place, self.last))
        state, tails = tuple(map(function, self.state)), tuple(map(function, self.tails))
        apart = tuple(tuple(map(function, state)) for state in self.apart)
        beside = None if self.beside is None else self.beside.mapped(function)
        return LayerCache(conv, state, place, last, apart, tails, beside)

    def rows(self, at: Tensor) -> "LayerCache":
        """Returns the memory of the sequences `at` [n]."""
        conv, place, last, *parts = (
            part.index_select(0, at.to(part.device))
            for part in (self.conv, self.place, self.last, *self.state, *self.tails)
        )
        state, tails = tuple(parts[: len(self.state)]), tuple(parts[len(self.state) :])
        apart = tuple(self.apart[i] for i in at.tolist()) if self.apart else ()
        return LayerCache(conv, state, place, last, apart, tails, None if self.beside is None else self.beside.rows(at))
