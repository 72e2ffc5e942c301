"""Random numbers as a function of an address, so that data depend on no device, model or order of drawing.

Every value is computed in integers, or in float64 operations that IEEE 754 rounds in one way only. So an address gives
the same values on every device. Torch's `log` and `pow` would not: they differ between CPU and CUDA in the last bit.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

import torch
from torch import Tensor

from deltalab.ops.backends import automatic

# The constants of SplitMix64 (Steele, Lea, Flood 2014), as the signed 64-bit integers of torch.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)

# log m = 2 s (1 + s^2/3 + s^4/5 + ...) with s = (m - 1)/(m + 1). For m in [1/2, 1), 12 terms are right to 1e-12.
_TERMS = 12


def hashed(address: str, stream: str) -> int:
    """Returns the signed 64-bit integer from which the random words of a stream at an address start."""
    return int.from_bytes(sha256(f"{address}/{stream}".encode()).digest()[:8], "little", signed=True)


def _shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)  # torch's own shift copies the sign


@dataclass(frozen=True)
class Random:
    """The random numbers at an address. Every draw names its `stream`, and streams are independent of each other.

    A draw of shape [B, ...] gives B rows of an endless table. A row does not depend on the other rows of the draw.

    Attributes:
        address: The address.
        device: The device of the draws.
        rows: The rows of the table that a draw gives, int64 [B]; None for the first B rows.

    Examples:
        >>> Random("a", torch.device("cpu")).integers("dice", 6, 1, 8)
        tensor([[4, 4, 0, 2, 5, 2, 1, 4]])
        >>> Random("a", torch.device("cpu"), rows=torch.tensor([1, 0])).integers("dice", 6, 2, 4)
        tensor([[5, 2, 1, 4],
                [4, 4, 0, 2]])
    """

    address: str
    device: torch.device
    rows: Tensor | None = field(default=None, compare=False)

    def words(self, stream: str, *shape: int) -> Tensor:
        """Draws int64 `shape` of 64 random bits each, by SplitMix64 from a hash of address and stream."""
        starts, rows = self._begin(stream, shape[0])
        kernel = automatic(self.device.type).integers
        if kernel is not None:
            return kernel(starts, rows, shape)
        size, width = shape[0] // len(starts), math.prod(shape[1:])
        rows = torch.arange(size, device=self.device)[None] if rows is None else rows
        column = torch.arange(1, width + 1, device=self.device)
        words = (rows[..., None] * width + column) * _GAMMA + starts[:, None, None]
        for bits, factor in _MIX:
            words = (words ^ _shift(words, bits)) * factor
        return words.view(shape)

    def _begin(self, stream: str, count: int) -> tuple[Tensor, Tensor | None]:
        """Returns where the words of each of n equal parts of `count` rows start, [n], and the rows of each part.

        The rows are [n, count / n] of the table, or None for the first rows.
        """
        starts = self._starts(stream)
        rows = None if self.rows is None else self.rows.view(-1, count // len(starts)).expand(len(starts), -1)
        return starts, rows

    def _starts(self, stream: str) -> Tensor:
        return torch.full((1,), hashed(self.address, stream), device=self.device)

    def integers(self, stream: str, below: int | Tensor, *shape: int) -> Tensor:
        """Draws int64 `shape`, uniform in [0, below) to within below / 2^63; `below` may broadcast to `shape`."""
        kernel = automatic(self.device.type).integers
        if kernel is not None:
            return kernel(*self._begin(stream, shape[0]), shape, shift=1, below=below)
        return _shift(self.words(stream, *shape), 1) % below

    def exponential(self, stream: str, *shape: int) -> Tensor:
        """Draws float64 `shape`: -log u for u uniform in (0, 1), to within 1e-12."""
        kernel = automatic(self.device.type).exponential
        if kernel is not None:
            return kernel(*self._begin(stream, shape[0]), shape, terms=_TERMS)
        uniform = (_shift(self.words(stream, *shape), 12).double() + 0.5) * 2.0**-52
        mantissa, exponent = torch.frexp(uniform)
        ratio = (mantissa - 1) / (mantissa + 1)
        square = ratio * ratio
        series = torch.full_like(square, 1 / (2 * _TERMS - 1))
        for term in reversed(range(_TERMS - 1)):
            series = series * square + 1 / (2 * term + 1)
        return -(exponent.double() * math.log(2) + 2 * ratio * series)

    def distinct(self, stream: str, below: int, *shape: int) -> Tensor:
        """Draws int64 `shape` of different integers of [0, below) along the last axis.

        The last axis is an ordered choice of `count` <= `below` integers, and all choices are equally likely. They are
        the first `count` places after a Fisher-Yates shuffle of 0 ... below - 1, in which step j swaps the places j and
        swap[j], uniform in [j, below). The swaps are resolved for all steps at once, in O(log count) tensor operations,
        without storing the `below` places, of which a row may have thousands.

        Args:
            stream: The name of the stream.
            below: The bound of the integers.
            *shape: The shape, whose last entry is `count`.
        """
        count = shape[-1]
        kernels = automatic(self.device.type)
        if kernels.distinct is not None and count <= kernels.most_distinct and len(shape) > 1:
            return kernels.distinct(*self._begin(stream, shape[0]), shape, below=below)
        step = torch.arange(count, device=self.device)
        swap = (step + self.integers(stream, below - step, *shape)).view(-1, count)
        step = step.expand_as(swap)

        # At step j, place j holds the content of place i, where i is the last earlier step with swap[i] = j. That
        # content may itself have come from an earlier step. To follow the origins to their root takes log2(count)
        # doublings. The last column collects the swaps with places at which no step begins. A step that swaps a place
        # with itself passes nothing on.
        origin = torch.full((len(swap), count + 1), -1, device=self.device)
        origin = origin.scatter_reduce(1, swap.clamp(max=count), step, "amax")[:, :count]
        origin = torch.where(origin < 0, step, origin)
        for _ in range((count - 1).bit_length()):
            origin = origin.gather(1, origin)

        # Place swap[j] holds the content that the last earlier step with the same swap put there, if there is such a
        # step.
        place, time = swap.sort(dim=1, stable=True)
        earlier = torch.where(place[:, 1:] == place[:, :-1], time[:, :-1], -1)
        last = torch.full_like(swap, -1).scatter(1, time[:, 1:], earlier)
        return torch.where(last < 0, swap, origin.gather(1, last.clamp(min=0))).view(shape)


@dataclass(frozen=True)
class Together(Random):
    """The random numbers at n addresses: the rows of a draw are n equal parts, one for each address.

    Draws are functions of the tensors `starts`. So a CUDA graph draws new numbers when these tensors are overwritten.

    Attributes:
        starts: The value of `hashed` for each stream at the n addresses, int64 [n] on the device.

    Examples:
        >>> cpu = torch.device("cpu")
        >>> [Random(address, cpu).integers("dice", 6, 2, 2).tolist() for address in "ab"]
        [[[4, 4], [0, 2]], [[3, 0], [2, 3]]]
        >>> both = Together("", cpu, starts={"dice": torch.tensor([hashed(address, "dice") for address in "ab"])})
        >>> both.integers("dice", 6, 4, 2).tolist()
        [[4, 4], [0, 2], [3, 0], [2, 3]]
    """

    starts: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def _starts(self, stream: str) -> Tensor:
        return self.starts[stream]
