"""What kernels of every structure share: where a chunk lies in packed sequences, and the inverse that chunks need."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from deltalab.errors import InputError

LOWEST = tl.constexpr(-64.0)
"""Log-decays are clamped to it: exp(-64) is nothing beside 1 in fp32, and sums of it stay exact enough to subtract."""

LOG2_E = tl.constexpr(1.4426950408889634)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

PRECISIONS = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}
"""Of products in fp32. Operands of tf32 are cut off after 10 bits, not rounded: an inverse is worse by that than by
being rounded to fp16 afterwards."""

ALL_REGISTERS = 255
"""That a thread may have. Products in fp32, left to itself, ptxas puts into 32 of them and up to 10 KiB of memory."""

MOVES = ("length", "chunks", "from_chunk", "to_chunk", "every", "segments", "span", "sequences", "H")
"""Arguments that change from batch to batch: nothing is compiled anew for special values of theirs."""


@dataclass(frozen=True)
class Problem:
    """What a plan of launches is for: sequences, each packed one counted, their length and widths, chunks of `size`."""

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    size: int


def chunk_map(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> tuple[Tensor, Tensor, int]:
    """Of packed sequences with bounds cu_seqlens [N + 1]: the sequence of each chunk, each one's first chunk.

    Returns (sequence [bound], first chunk of each [N + 1], bound); the bound on the number of chunks needs no look at
    the device, and chunks beyond the last one are of sequence N.
    """
    bound = tokens // chunk_size + cu_seqlens.numel() - 1
    counts = (cu_seqlens.diff() + chunk_size - 1) // chunk_size
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    at = torch.arange(bound, device=cu_seqlens.device, dtype=torch.int32)
    return torch.searchsorted(first, at, right=True, out_int32=True) - 1, first, bound


def absent(x: Tensor) -> Tensor:
    """In place of an output that there is none of, since operators return tensors and each its own: [B, 0]."""
    return x.new_empty(x.shape[0], 0)


def tiles(x: Tensor | None, rows: int, columns: int, *, store: bool = False, ragged: bool = False) -> Any:
    """A descriptor of x as a matrix with its last dimensions from dimension 2 on in a row, [B T, H K] or so, in tiles.

    Where a kernel stores at ragged ends it is x itself (see `put_rows`).
    """
    if x is None or (store and ragged):
        return x
    if x.data_ptr() % 16:
        # A view of something else; descriptors begin where 16 bytes do.
        x = x.clone()
    return TensorDescriptor.from_tensor(x.view(x.shape[0] * x.shape[1], -1), [rows, columns])


def fold_into_batch(op: Any) -> None:
    """Registers op, all of whose tensors have a batch dimension first, with `torch.func.vmap`: one larger batch.

    Autograd stays outside: vmap(f)(x).sum().backward().
    """

    def folded(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        size = info.batch_size

        def fold(x: Any, dim: int | None) -> Any:
            if not isinstance(x, Tensor):
                return x
            if not x.is_floating_point():
                raise InputError("packed sequences (cu_seqlens) cannot be mapped over: add them to the packing")
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1).contiguous()

        found = op(*map(fold, args, in_dims))
        unfolded = [one.unflatten(0, (size, -1) if one.shape[0] else (size, 0)) for one in found]
        return type(found)(unfolded), type(found)([0] * len(unfolded))

    op.register_vmap(folded)


@triton.jit
def unit_lower_inverse(m, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + m)^{-1} - I, m [SIZE, SIZE] strictly lower triangular, fp32: inverts blocks of 2, 4, 8 .. from those within.

    Without I, since x is added, unrounded, to its product with rounded x.
    Only products that block elimination would form: as stable as substitution, where powers of m would overflow.
    Up to 16, blocks on the diagonal are a batch of their own: whole matrices would be mostly zeros.
    """
    BLOCKS: tl.constexpr = SIZE // 16
    block = tl.arange(0, BLOCKS)
    row, column = tl.arange(0, 16)[None, :, None], tl.arange(0, 16)[None, None, :]
    same = (block[:, None] == block[None, :])[:, None, :, None]
    on = tl.sum(tl.where(same, tl.reshape(m, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    small = tl.where((row // 2 == column // 2) & (row > column), -on, 0.0)
    for level in tl.static_range(1, 4):
        quadrant = (row >> level + 1 == column >> level + 1) & (row >> level > column >> level)
        across = tl.where(quadrant, on, 0.0)
        below = tl.dot(small, across, across, input_precision=PRECISION)
        small -= tl.dot(below, small, below, input_precision=PRECISION)
    inverse = tl.reshape(tl.where(same, tl.expand_dims(small, 2), 0.0), [SIZE, SIZE])
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    for level in tl.static_range(4, 8):
        if 1 << level < SIZE:
            quadrant = (row >> level + 1 == column >> level + 1) & (row >> level > column >> level)
            across = tl.where(quadrant, m, 0.0)
            below = tl.dot(inverse, across, across, input_precision=PRECISION)
            inverse -= tl.dot(below, inverse, below, input_precision=PRECISION)
    return inverse


@triton.jit
def locate(i, of, first, chunks, PACKED: tl.constexpr):
    """Sequence and chunk of program i, for `chunks` chunks in each sequence or those of `chunk_map`."""
    if PACKED:
        sequence = tl.load(of + i)
        return sequence, i - tl.load(first + sequence)
    return i // chunks, i % chunks


@triton.jit
def bounds(sequence, cu_seqlens, length, PACKED: tl.constexpr):
    """The row that a sequence starts at, and its length."""
    if PACKED:
        start = tl.load(cu_seqlens + sequence)
        return start, tl.load(cu_seqlens + sequence + 1) - start
    return sequence * length, length


@triton.jit
def get_rows(x, row, valid, column, SIZE: tl.constexpr, RAGGED: tl.constexpr):
    """A tile of the descriptor x from a row and a column on; ragged, 0 from its `valid`-th row on."""
    found = x.load([row, column])
    if RAGGED:
        found = tl.where((tl.arange(0, SIZE) < valid)[:, None], found, 0.0)
    return found


@triton.jit
def put_rows(x, tile, row, valid, column, columns, SIZE: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """Stores a tile where `get_rows` finds it. Ragged, x is no descriptor but a pointer to rows of `columns`."""
    if RAGGED:
        i = tl.arange(0, SIZE)
        at = x + row.to(tl.int64) * columns + column + i[:, None] * columns + tl.arange(0, WIDTH)[None, :]
        tl.store(at, tile.to(x.dtype.element_ty), mask=(i < valid)[:, None])
    else:
        x.store([row, column], tile.to(x.dtype))


@triton.jit
def scalars(x, row, valid, head, heads, SIZE: tl.constexpr):
    """[SIZE] of x [.., heads] from a row on, in fp32: 0 from the `valid`-th on."""
    i = tl.arange(0, SIZE)
    return tl.load(x + row.to(tl.int64) * heads + head + i * heads, mask=i < valid, other=0.0).to(tl.float32)


@triton.jit
def put_scalars(x, value, row, valid, head, heads, SIZE: tl.constexpr):
    """Stores where `scalars` finds it."""
    i = tl.arange(0, SIZE)
    tl.store(x + row.to(tl.int64) * heads + head + i * heads, value.to(x.dtype.element_ty), mask=i < valid)


@triton.jit
def decays(g, row, valid, head, heads, SIZE: tl.constexpr):
    """g of a chunk's tokens and of those before each, to be loaded before anything waits and added up after."""
    i = tl.arange(0, SIZE)
    at = g + (row.to(tl.int64) + i) * heads + head
    return tl.load(at, mask=i < valid, other=0.0), tl.load(at - heads, mask=(i > 0) & (i <= valid), other=0.0)


@triton.jit
def cumulative(steps, SIZE: tl.constexpr, KIND: tl.constexpr):
    """G_i, G_{i-1} and G_C of a chunk's `decays`, base 2; nothing decays beyond the sequence or without g."""
    if steps is None:
        sums = tl.zeros([SIZE], KIND)
        earlier = sums
    else:
        # Not one by subtraction from the other: both are sums of the same terms in the same order.
        sums = tl.cumsum(tl.maximum(steps[0].to(tl.float32), LOWEST).to(KIND) * LOG2_E, 0)
        earlier = tl.cumsum(tl.maximum(steps[1].to(tl.float32), LOWEST).to(KIND) * LOG2_E, 0)
    return sums, earlier, tl.min(sums, 0)


@triton.jit
def held(x):
    """x, the left operand of a product in a loop that leaves it as it is.

    ptxas (12.8, 12.9) may give the registers of a WGMMA's left operand away after its last product of an iteration, so
    that the next one reads what lies there then (`benchmarks/sass.py` finds it). It does not where anything else reads
    them too: this looks for bits that no rounded number has.
    """
    if not INTERPRETED and x.dtype != tl.float32:
        tl.inline_asm_elementwise(
            """{
            .reg .pred never; .reg .b32 bits;
            and.b32 bits, $4, $5; and.b32 bits, bits, $6; and.b32 bits, bits, $7;
            setp.eq.u32 never, bits, 0x7fe1fe1d; @never trap;
            mov.b32 $0, $4; mov.b32 $1, $5; mov.b32 $2, $6; mov.b32 $3, $7;
            }""",
            "=r,=r,=r,=r,r,r,r,r",
            [x],
            x.dtype,
            is_pure=False,
            pack=8,
        )
    return x


@triton.jit
def apart(later, earlier, i, j, STRICT: tl.constexpr, DECAYS: tl.constexpr = True):
    """exp2(later_i - earlier_j) where j <= i, or j < i; else 0. Given as [.., 1] and [1, ..], either way round.

    Not DECAYS: both are 0, and an exponential for each pair would take up to a tenth of a kernel's time.
    """
    there = i > j if STRICT else i >= j
    if DECAYS:
        found = tl.exp2(tl.where(there, (later - earlier).to(tl.float32), float("-inf")))
    else:
        found = tl.where(there, 1.0, 0.0)
    return found
