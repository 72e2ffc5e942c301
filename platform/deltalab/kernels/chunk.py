"""Functions that kernels share: they find a chunk, load and store its rows, and compute its decays and inverse."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-64.0)
"""The lower bound of a log-decay. exp(-64) added to 1 in fp32 is 1, and sums of -64 stay exact enough to subtract."""

LOG2_E = tl.constexpr(1.4426950408889634)

PTX = tl.constexpr(not triton.knobs.runtime.interpret and torch.version.hip is None)

MOVES = ("length", "chunks", "from_chunk", "to_chunk", "segment_chunks", "segments", "span", "sequences", "H")
"""Arguments that change from batch to batch. Triton compiles no kernel again because one of them is 1 or a multiple of
16."""


@triton.jit
@no_type_check
def unit_lower_inverse(m, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Computes (I + m)^{-1} - I in fp32 for strictly lower triangular m [BT, BT], by blocks of 2, 4, 8 and so on.

    The result leaves out I: to multiply x by the inverse, callers multiply rounded x by the result, and add x itself,
    unrounded. The inverse is computed by block elimination, so it is as stable as substitution; powers of m would
    overflow. Blocks up to 16 on the diagonal are computed as a batch, because whole matrices would be mostly zeros.
    """
    BLOCKS: tl.constexpr = BT // 16
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
    inverse = tl.reshape(tl.where(same, tl.expand_dims(small, 2), 0.0), [BT, BT])
    row, column = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    for level in tl.static_range(4, 8):
        if 1 << level < BT:
            quadrant = (row >> level + 1 == column >> level + 1) & (row >> level > column >> level)
            across = tl.where(quadrant, m, 0.0)
            below = tl.dot(inverse, across, across, input_precision=PRECISION)
            inverse -= tl.dot(below, inverse, below, input_precision=PRECISION)
    return inverse


@triton.jit
@no_type_check
def locate(i, chunk_sequences, first_chunks, chunks, PACKED: tl.constexpr):
    """Returns the sequence and the chunk of program i.

    A sequence has `chunks` chunks. If PACKED, `launch.chunk_map` has found the chunks instead.
    """
    if PACKED:
        sequence = tl.load(chunk_sequences + i)
        return sequence, i - tl.load(first_chunks + sequence)
    return i // chunks, i % chunks


@triton.jit
@no_type_check
def bounds(sequence, cu_seqlens, length, PACKED: tl.constexpr):
    """The first row of a sequence, and its length."""
    if PACKED:
        start = tl.load(cu_seqlens + sequence)
        return start, tl.load(cu_seqlens + sequence + 1) - start
    return sequence * length, length


@triton.jit
@no_type_check
def get_rows(x, row, valid, column, BT: tl.constexpr, RAGGED: tl.constexpr):
    """Loads the tile of descriptor x that begins at a row and a column. If RAGGED, rows from `valid` on are 0."""
    tile = x.load([row, column])
    if RAGGED:
        tile = tl.where((tl.arange(0, BT) < valid)[:, None], tile, 0.0)
    return tile


@triton.jit
@no_type_check
def put_rows(x, tile, row, valid, column, columns, BT: tl.constexpr, WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """Stores a tile where `get_rows` loads it. If RAGGED, x is a pointer to rows of `columns`, not a descriptor."""
    if RAGGED:
        i = tl.arange(0, BT)
        at = x + row.to(tl.int64) * columns + column + i[:, None] * columns + tl.arange(0, WIDTH)[None, :]
        tl.store(at, tile.to(x.dtype.element_ty), mask=(i < valid)[:, None])
    else:
        x.store([row, column], tile.to(x.dtype))


@triton.jit
@no_type_check
def rows(x, row, valid, head, H, column, width, BT: tl.constexpr, FULL: tl.constexpr):
    """Returns pointers to BT rows of a head of x [.., H, width], from `row` on, and a mask of the elements that exist.

    Serves tensors that no descriptor takes, because their width is not a multiple of a block. The first `valid` rows
    exist, and all columns do if FULL.
    """
    i = tl.arange(0, BT)
    at = x + (row.to(tl.int64) * H + head) * width + (i[:, None] * (H * width) + column[None, :])
    mask = (i < valid)[:, None]
    return at, mask if FULL else mask & (column < width)[None, :]


@triton.jit
@no_type_check
def scalars(x, row, valid, head, heads, BT: tl.constexpr):
    """Loads BT numbers of a head of x [.., heads], from `row` on, in fp32. Elements from `valid` on are 0."""
    i = tl.arange(0, BT)
    return tl.load(x + row.to(tl.int64) * heads + head + i * heads, mask=i < valid, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def put_scalars(x, value, row, valid, head, heads, BT: tl.constexpr):
    """Stores `value` [BT] where `scalars` loads it."""
    i = tl.arange(0, BT)
    tl.store(x + row.to(tl.int64) * heads + head + i * heads, value.to(x.dtype.element_ty), mask=i < valid)


@triton.jit
@no_type_check
def decays(g, row, valid, head, heads, BT: tl.constexpr):
    """Loads g of a chunk's tokens, and of the token before each. Call it early: `cumulative` waits for the loads."""
    i = tl.arange(0, BT)
    at = g + (row.to(tl.int64) + i) * heads + head
    return tl.load(at, mask=i < valid, other=0.0), tl.load(at - heads, mask=(i > 0) & (i <= valid), other=0.0)


@triton.jit
@no_type_check
def cumulative(steps, BT: tl.constexpr, DTYPE: tl.constexpr):
    """Returns G_i, G_{i-1} and G_C of a chunk in base 2. `steps` is what `decays` returned, or None without g.

    Tokens beyond the sequence have g = 0. Without g, all tokens have g = 0.
    """
    if steps is None:
        sums = tl.zeros([BT], DTYPE)
        earlier = sums
    else:
        # Two sums of the same terms in the same order: a subtraction would lose precision.
        sums = tl.cumsum(tl.maximum(steps[0].to(tl.float32), LOWEST).to(DTYPE) * LOG2_E, 0)
        earlier = tl.cumsum(tl.maximum(steps[1].to(tl.float32), LOWEST).to(DTYPE) * LOG2_E, 0)
    return sums, earlier, tl.min(sums, 0)


@triton.jit
@no_type_check
def held(x):
    """Returns x. Wrap the left operand of a product in `held` if the loop around the product does not change x.

    ptxas (12.8, 12.9) may reuse the registers of a WGMMA's left operand after the operand's last product of an
    iteration, so that the next iteration reads other numbers (`benchmarks/sass.py` finds such products). ptxas keeps
    the registers if another instruction reads them too. The instruction here looks for bits that no rounded number has.
    """
    if PTX and x.dtype != tl.float32:
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
@no_type_check
def decay_between(later, earlier, i, j, STRICT: tl.constexpr, DECAYS: tl.constexpr = True):
    """exp2(later_i - earlier_j) for j <= i, or for j < i if STRICT; else 0. Operands are [.., 1] and [1, ..].

    DECAYS is False if nothing decays, which saves an exponential for each pair, up to a tenth of a kernel's time.
    """
    visible = i > j if STRICT else i >= j
    if DECAYS:
        decay = tl.exp2(tl.where(visible, (later - earlier).to(tl.float32), float("-inf")))
    else:
        decay = tl.where(visible, 1.0, 0.0)
    return decay
