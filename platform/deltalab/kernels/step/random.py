"""Random numbers in one pass. PyTorch's operators take 20 launches at each use, most of a step of a small model.

The bits are those of `deltalab.tasks.randomness` without kernels. They follow from integers, and from float64
operations that are rounded one by one, because fused multiply-add is off.
"""

import math
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
"""Numbers of a program."""

WIDEST = 256
"""The most integers that `distinct` chooses, because it compares each integer with each other."""

TILE = 1024
"""Comparisons that a program holds at a time."""

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB)
LOG_2 = tl.constexpr(math.log(2))


@triton.jit
@no_type_check
def splitmix64(starts, rows, by_start, by_part, by_row, i, mask, width):
    """Words i of this program's stream, in uint64."""
    row = i // width
    if rows is not None:
        row_number = tl.load(rows + tl.program_id(1).to(tl.int64) * by_part + row * by_row, mask=mask, other=0)
    else:
        row_number = row
    start = tl.load(starts + tl.program_id(1).to(tl.int64) * by_start)
    z = (row_number * width + i % width + 1).to(tl.uint64, bitcast=True) * GAMMA + start.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * MULTIPLIER_1
    z = (z ^ (z >> 27)) * MULTIPLIER_2
    return z ^ (z >> 31)


VARYING = [
    "starts", "rows", "by_start", "by_part", "by_row", "total", "width", "count", "below", "below_row", "below_column",
]  # fmt: skip
"""Arguments for which no kernel is compiled again: sizes, and the place where a table's column begins."""


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def integers_kernel(
    starts, rows, below, out, by_start, by_part, by_row, below_row, below_column, total, width,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws one block of one stream: words modulo `below`, or whole words if it is None.

    `below` is a pointer if it has strides, and else a number.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < total
    words = splitmix64(starts, rows, by_start, by_part, by_row, i, mask, width)
    numbers = (words >> SHIFT).to(tl.int64, bitcast=True)
    i += tl.program_id(1).to(tl.int64) * total
    if below_row is not None:
        numbers %= tl.load(below + i // width * below_row + i % width * below_column, mask=mask, other=1)
    elif below is not None:
        numbers %= below
    tl.store(out + i, numbers, mask=mask)


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def exponential_kernel(
    starts, rows, out, by_start, by_part, by_row, total, width, TERMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes -log u as `Random.exponential` does, operation by operation."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < total
    words = splitmix64(starts, rows, by_start, by_part, by_row, i, mask, width)
    uniform = ((words >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.0**-52
    bits = uniform.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) - 1022).to(tl.float64)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = tl.full([BLOCK], 1 / (2 * TERMS - 1), tl.float64)
    for term in tl.static_range(TERMS - 2, -1, -1):
        series = series * square + 1 / (2 * term + 1)
    numbers = -(exponent * LOG_2 + 2 * ratio * series)
    tl.store(out + tl.program_id(1).to(tl.int64) * total + i, numbers, mask=mask)


@triton.jit
@no_type_check
def swaps(starts, rows, by_start, by_part, by_row, choice, step, count, below, width):
    """Returns the place in [step, below) that each step swaps with, or -1 for steps beyond the last."""
    mask = step < count
    words = splitmix64(starts, rows, by_start, by_part, by_row, choice * count + step, mask, width)
    place = step + (words >> 1).to(tl.int64, bitcast=True) % tl.where(mask, below - step, 1)
    return tl.where(mask, place, -1)


@triton.jit(do_not_specialize=VARYING)
@no_type_check
def distinct_kernel(
    starts, rows, out, by_start, by_part, by_row, count, below, width,
    DOUBLINGS: tl.constexpr, BC: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """Draws one choice of distinct integers."""
    choice, step = tl.program_id(0).to(tl.int64), tl.arange(0, BC)
    swap = swaps(starts, rows, by_start, by_part, by_row, choice, step, count, below, width)
    origin = tl.full([BC], -1, tl.int32)
    last = origin
    for begin in range(0, count, BI):
        other = begin + tl.arange(0, BI)
        place = swaps(starts, rows, by_start, by_part, by_row, choice, other, count, below, width)[:, None]
        other = other[:, None]
        origin = tl.maximum(origin, tl.max(tl.where(place == step[None, :], other, -1), 0))
        earlier = (place == swap[None, :]) & (other < step[None, :])
        last = tl.maximum(last, tl.max(tl.where(earlier, other, -1), 0))
    origin = tl.where(origin < 0, step, origin)
    for _ in tl.static_range(DOUBLINGS):
        origin = tl.gather(origin, origin, 0)
    numbers = tl.where(last < 0, swap, tl.gather(origin, tl.maximum(last, 0), 0).to(tl.int64))
    choice_at = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + choice) * count
    tl.store(out + choice_at + step, numbers, mask=step < count)


def integers(
    starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], *, shift: int = 0, below: int | Tensor | None = None
) -> Tensor:
    """SplitMix64's words in int64, shifted right logically, and modulo `below` if it is given.

    Args:
        starts: The start of each stream, [n], as `Random._begin` returns it.
        rows: The rows to draw, [n, R], for n R rows in all, as `Random._begin` returns them; None for the first rows.
        shape: The shape of the result.
        shift: The number of bits.
        below: The bound that each number is below, or None.
    """
    streams = Streams.of(starts, rows, shape, torch.int64)
    below_row, below_column = None, None
    if isinstance(below, Tensor):
        below = below.broadcast_to(shape).reshape(shape[0], streams.width)
        below_row, below_column = below.stride()
    with torch.cuda.device_of(streams.out):
        integers_kernel[(triton.cdiv(streams.total, BLOCK), len(starts))](
            **streams.arguments(), total=streams.total, below=below, below_row=below_row, below_column=below_column,
            SHIFT=shift, BLOCK=BLOCK,
        )  # fmt: skip
    return streams.out


def exponential(starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], *, terms: int) -> Tensor:
    """-log u in float64, in this shape, by a series of `terms` terms, as `Random.exponential` computes it."""
    streams = Streams.of(starts, rows, shape, torch.float64)
    with torch.cuda.device_of(streams.out):
        exponential_kernel[(triton.cdiv(streams.total, BLOCK), len(starts))](
            **streams.arguments(), total=streams.total, TERMS=terms, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return streams.out


def distinct(starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], *, below: int) -> Tensor:
    """Choices in int64, [R, ..., count], as `Random.distinct` chooses, for a count of at most `WIDEST`."""
    streams = Streams.of(starts, rows, shape, torch.int64)
    count = shape[-1]
    padded = triton.next_power_of_2(count)
    with torch.cuda.device_of(streams.out):
        distinct_kernel[(streams.total // count, len(starts))](
            **streams.arguments(), count=count, below=below, DOUBLINGS=(count - 1).bit_length(),
            BC=padded, BI=min(padded, TILE // padded), num_warps=1 if padded <= 32 else 4,
        )  # fmt: skip
    return streams.out


class Streams(NamedTuple):
    """Memory for the numbers of several streams, with equally many numbers for each stream.

    Attributes:
        out: The numbers.
        starts: The start of each stream.
        rows: The rows to draw, or None for the first rows.
        total: Numbers of a stream.
        width: Numbers of a row.
    """

    out: Tensor
    starts: Tensor
    rows: Tensor | None
    total: int
    width: int

    @classmethod
    def of(cls, starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> "Streams":
        """Allocates the memory.

        Raises:
            RuntimeError: The streams would not have equally many rows.
        """
        rows_of_stream, width = shape[0] // len(starts), math.prod(shape[1:])
        out = torch.empty(len(starts), rows_of_stream, width, dtype=dtype, device=starts.device).view(shape)
        return cls(out, starts, rows, rows_of_stream * width, width)

    def arguments(self) -> dict[str, Any]:
        """The arguments that every kernel takes."""
        (by_start,) = self.starts.stride()
        by_part, by_row = (0, 0) if self.rows is None else self.rows.stride()
        return {
            "starts": self.starts, "rows": self.rows, "out": self.out,
            "by_start": by_start, "by_part": by_part, "by_row": by_row, "width": self.width,
        }  # fmt: skip
