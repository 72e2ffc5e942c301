"""Random numbers in one pass. PyTorch's operators take 20 launches at each use, most of a step of a small model.

The bits are those of `deltalab.tasks.randomness` without kernels: integers, and float64 operations that are rounded one
by one, because fused multiply-add is off.
"""

import math
from typing import Any, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256

WIDEST = 256
"""The most integers that `distinct` chooses, because it compares each with each."""

TILE = 1024
"""Comparisons that a program holds at a time."""

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
LOG_2 = tl.constexpr(math.log(2))


@triton.jit
@no_type_check
def splitmix64(starts, rows, by_start, by_part, by_row, i, there, width):
    """Words i of this program's part, uint64."""
    row = i // width
    if rows is not None:
        at = tl.load(rows + tl.program_id(1).to(tl.int64) * by_part + row * by_row, mask=there, other=0)
    else:
        at = row
    start = tl.load(starts + tl.program_id(1).to(tl.int64) * by_start)
    z = (at * width + i % width + 1).to(tl.uint64, bitcast=True) * GAMMA + start.to(tl.uint64, bitcast=True)
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


# No kernel is compiled again because of a size, or of where a table's column begins.
ANY = [
    "starts", "rows", "by_start", "by_part", "by_row", "total", "width", "count", "below", "below_row", "below_column",
]  # fmt: skip


@triton.jit(do_not_specialize=ANY)
@no_type_check
def integers_kernel(
    starts, rows, below, out, by_start, by_part, by_row, below_row, below_column, total, width,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each block of each part. below: None, a number if it has no strides, or a pointer."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < total
    words = splitmix64(starts, rows, by_start, by_part, by_row, i, there, width)
    found = (words >> SHIFT).to(tl.int64, bitcast=True)
    i += tl.program_id(1).to(tl.int64) * total
    if below_row is not None:
        found %= tl.load(below + i // width * below_row + i % width * below_column, mask=there, other=1)
    elif below is not None:
        found %= below
    tl.store(out + i, found, mask=there)


@triton.jit(do_not_specialize=ANY)
@no_type_check
def exponential_kernel(
    starts, rows, out, by_start, by_part, by_row, total, width, TERMS: tl.constexpr, BLOCK: tl.constexpr
):
    """-log u as `Random.exponential` computes it, operation by operation."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < total
    words = splitmix64(starts, rows, by_start, by_part, by_row, i, there, width)
    uniform = ((words >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.0**-52
    bits = uniform.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) - 1022).to(tl.float64)
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = tl.full([BLOCK], 1 / (2 * TERMS - 1), tl.float64)
    for term in tl.static_range(TERMS - 2, -1, -1):
        series = series * square + 1 / (2 * term + 1)
    found = -(exponent * LOG_2 + 2 * ratio * series)
    tl.store(out + tl.program_id(1).to(tl.int64) * total + i, found, mask=there)


@triton.jit
@no_type_check
def swaps(starts, rows, by_start, by_part, by_row, choice, step, count, below, width):
    """The places in [step, below) that steps swap with; -1 for steps beyond the last."""
    there = step < count
    words = splitmix64(starts, rows, by_start, by_part, by_row, choice * count + step, there, width)
    place = step + (words >> 1).to(tl.int64, bitcast=True) % tl.where(there, below - step, 1)
    return tl.where(there, place, -1)


@triton.jit(do_not_specialize=ANY)
@no_type_check
def distinct_kernel(
    starts, rows, out, by_start, by_part, by_row, count, below, width,
    DOUBLINGS: tl.constexpr, BC: tl.constexpr, BI: tl.constexpr,
):  # fmt: skip
    """A program for each choice."""
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
    found = tl.where(last < 0, swap, tl.gather(origin, tl.maximum(last, 0), 0).to(tl.int64))
    first = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + choice) * count
    tl.store(out + first + step, found, mask=step < count)


def integers(
    starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], *, shift: int = 0, below: int | Tensor | None = None
) -> Tensor:
    """int64 `shape`: SplitMix64's words, shifted right logically, and modulo `below` if it is given.

    starts [n], rows [n, R]: as `Random._begin` returns them, for n R rows.
    """
    part = Parts.of(starts, rows, shape, torch.int64)
    below_row, below_column = None, None
    if isinstance(below, Tensor):
        below = below.broadcast_to(shape).reshape(shape[0], part.width)
        below_row, below_column = below.stride()
    with torch.cuda.device_of(part.out):
        integers_kernel[(triton.cdiv(part.total, BLOCK), len(starts))](
            **part.streams(), total=part.total, below=below, below_row=below_row, below_column=below_column,
            SHIFT=shift, BLOCK=BLOCK,
        )  # fmt: skip
    return part.out


def exponential(starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], *, terms: int) -> Tensor:
    """float64 `shape`: -log u by a series of `terms`, as `Random.exponential` computes it."""
    part = Parts.of(starts, rows, shape, torch.float64)
    with torch.cuda.device_of(part.out):
        exponential_kernel[(triton.cdiv(part.total, BLOCK), len(starts))](
            **part.streams(), total=part.total, TERMS=terms, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return part.out


def distinct(starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], *, below: int) -> Tensor:
    """int64 `[R, ..., count]`: as `Random.distinct` chooses, for a count of at most `WIDEST`."""
    part = Parts.of(starts, rows, shape, torch.int64)
    count = shape[-1]
    padded = triton.next_power_of_2(count)
    with torch.cuda.device_of(part.out):
        distinct_kernel[(part.total // count, len(starts))](
            **part.streams(), count=count, below=below, DOUBLINGS=(count - 1).bit_length(),
            BC=padded, BI=min(padded, TILE // padded), num_warps=1 if padded <= 32 else 4,
        )  # fmt: skip
    return part.out


class Parts(NamedTuple):
    """Room for numbers of equal parts, each from a stream of its own. total: numbers of a part. width: of a row."""

    out: Tensor
    starts: Tensor
    rows: Tensor | None
    total: int
    width: int

    @classmethod
    def of(cls, starts: Tensor, rows: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> "Parts":
        """Raises RuntimeError if parts would not be equal."""
        size, width = shape[0] // len(starts), math.prod(shape[1:])
        out = torch.empty(len(starts), size, width, dtype=dtype, device=starts.device).view(shape)
        return cls(out, starts, rows, size * width, width)

    def streams(self) -> dict[str, Any]:
        """What every kernel takes."""
        (by_start,) = self.starts.stride()
        by_part, by_row = (0, 0) if self.rows is None else self.rows.stride()
        return {
            "starts": self.starts, "rows": self.rows, "out": self.out,
            "by_start": by_start, "by_part": by_part, "by_row": by_row, "width": self.width,
        }  # fmt: skip
