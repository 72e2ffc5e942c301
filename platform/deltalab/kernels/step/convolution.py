"""Splits one product of x into q, k, v, gate and rest in one pass, with short convolution, SiLU and unit norm.

Every row of a program's tile walks along a part of a sequence, one token in each step. The earlier tokens that the
convolution needs are then still in registers, so each number is loaded once, and in the backward computed once.
"""
# ruff: noqa: RUF005  Triton does not support * in a tuple.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.chunk import MOVES
from deltalab.kernels.compilations import launch
from deltalab.kernels.launch import planned
from deltalab.kernels.register import absent, existing, register

EPS = tl.constexpr(1e-6)
"""The least norm that a vector is divided by."""

AHEAD = tl.constexpr(2)
AHEAD_BACKWARD = tl.constexpr(6)
"""Tokens that a row loads ahead. The backward has fewer warps at a time, whose loads must hide each other's wait."""

LANES = 64
"""The fewest channels of a program, 128 bytes of a row in 16 bits. A program holds a whole head if that is wider."""

TILE = 2048
"""Elements of a program, 16 for each thread of 4 warps: the tokens that a convolution sees at a time, of all rows."""

PROGRAMS = 1024
"""Programs that keep a GPU busy. Rows walk along at most 64 tokens, and along fewer to make as many programs."""


@triton.jit
@no_type_check
def columns(block, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Columns [1, GROUPS, LANES] of a part of WIDTH columns, in groups of GROUP, and which of the columns exist."""
    group = block * GROUPS + tl.arange(0, GROUPS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    column = group * GROUP + lane
    return column, (lane < GROUP) & (column < WIDTH)


@triton.jit
@no_type_check
def weights(w, run, column, mask, C: tl.constexpr, W: tl.constexpr):
    """Loads the W weights of these columns, from the first to the last."""
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(w + (run * W + i) * C + column, mask=mask, other=0.0).to(tl.float32),)
    return taps


@triton.jit
@no_type_check
def earlier(at, past, begin, mask, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """Loads the W - 1 tokens before those that `at` points to.

    Before a sequence come the tokens of `past`, or zeros.
    """
    seen = ()
    for i in tl.static_range(1, W):
        t = begin - W + i
        x_c = tl.load(at - (W - i) * P, mask=mask & (t >= 0), other=0.0)
        if past is not None:
            x_c += tl.load(past + (t + W - 1) * C, mask=mask & (t < 0), other=0.0)
        seen = seen + (x_c.to(tl.float32),)
    return seen


@triton.jit
@no_type_check
def convolved(seen, taps, place, i, mask, W: tl.constexpr):
    """Computes sum_i taps_i seen_i over the tokens of one sequence, or takes the token itself without a convolution."""
    if W == 0:
        z = seen[0]
    elif place is None:
        z = taps[0] * seen[0]
        for j in tl.static_range(1, W):
            z += taps[j] * seen[j]
    else:
        at = tl.load(place + i, mask=mask, other=0)
        z = taps[W - 1] * seen[W - 1]
        for j in tl.static_range(1, W):
            z += tl.where(at >= j, taps[W - 1 - j] * seen[W - 1 - j], 0.0)
    return z


@triton.jit
@no_type_check
def read(
    x, w, past, place, out, run, sequence, begin, end, valid, length, span, block,
    P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Computes one block of one part, out [.., WIDTH], from columns FIRST and on of x."""
    column, mask = columns(block, WIDTH, GROUP, GROUPS, LANES)
    taps = weights(w, run, FIRST + column, mask, C, W)
    mask = mask & valid
    row = sequence * length + begin
    x += row * P + FIRST + column
    out += row * WIDTH + column
    if place is not None:
        place += row
    if past is not None:
        past += sequence * ((W - 1) * C) + FIRST + column
    seen = earlier(x, past, begin, mask, P, C, W)
    coming = ()
    for i in tl.static_range(AHEAD):
        coming = coming + (tl.load(x + i * P, mask=mask & (begin + i < end), other=0.0),)
    for i in range(span):
        later = mask & (begin + i + AHEAD < end)
        coming = coming + (tl.load(x + (i + AHEAD) * P, mask=later, other=0.0),)
        seen = seen + (coming[0].to(tl.float32),)
        coming = coming[1:]
        y = convolved(seen, taps, place, i, valid & (begin + i < end), W)
        if SILU:
            y *= tl.sigmoid(y)
        if UNIT:
            y *= 1 / tl.maximum(tl.sqrt(tl.sum(y * y, 2, keep_dims=True)), EPS)
        tl.store(out + i * WIDTH, y.to(out.dtype.element_ty), mask=mask & (begin + i < end))
        seen = seen[1:]


@triton.jit
@no_type_check
def read_backward(
    x, w, past, place, d_out, d_x, d_past, d_w, run, program, sequence, begin, end, valid, length, span, block,
    ROWS: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The backward of `read`. d x_s = sum_i w_i d z_{s + W - 1 - i}, so a row walks W - 1 tokens beyond its part."""
    MORE: tl.constexpr = W - 1 if W else 0
    column, mask = columns(block, WIDTH, GROUP, GROUPS, LANES)
    taps = weights(w, run, FIRST + column, mask, C, W)
    own_mask = mask & valid
    row = sequence * length + begin
    x += row * P + FIRST + column
    d_x += row * P + FIRST + column
    d_out += row * WIDTH + column
    if place is not None:
        place += row
    if past is not None:
        past += sequence * (MORE * C) + FIRST + column
        d_past += sequence * (MORE * C) + FIRST + column
    seen = earlier(x, past, begin, own_mask, P, C, W)
    none = tl.zeros([ROWS, GROUPS, LANES], dtype=tl.float32)
    after = ()
    for _ in tl.static_range(1, W):
        after = after + (none,)
    places = ()
    if place is not None:
        for _ in tl.static_range(1, W):
            places = places + (tl.zeros([ROWS, 1, 1], dtype=tl.int32),)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (none,)
    last = tl.minimum(end + MORE, length)
    coming, d_coming = (), ()
    for i in tl.static_range(AHEAD_BACKWARD):
        later = own_mask & (begin + i < last)
        coming = coming + (tl.load(x + i * P, mask=later, other=0.0),)
        d_coming = d_coming + (tl.load(d_out + i * WIDTH, mask=later, other=0.0),)
    for i in range(span + MORE):
        later = own_mask & (begin + i + AHEAD_BACKWARD < last)
        coming = coming + (tl.load(x + (i + AHEAD_BACKWARD) * P, mask=later, other=0.0),)
        d_coming = d_coming + (tl.load(d_out + (i + AHEAD_BACKWARD) * WIDTH, mask=later, other=0.0),)
        seen = seen + (coming[0].to(tl.float32),)
        d_z = d_coming[0].to(tl.float32)
        coming, d_coming = coming[1:], d_coming[1:]
        if SILU:
            z = convolved(seen, taps, place, i, valid & (begin + i < last), W)
            sigmoid = tl.sigmoid(z)
            if UNIT:
                y = z * sigmoid
                norm = tl.sqrt(tl.sum(y * y, 2, keep_dims=True))
                inverse_norm = 1 / tl.maximum(norm, EPS)
                y *= inverse_norm
                along = tl.where(norm > EPS, tl.sum(y * d_z, 2, keep_dims=True), 0.0)
                d_z = inverse_norm * (d_z - along * y)
            d_z *= sigmoid * (1 + z * (1 - sigmoid))
        if W > 0:
            own_d_z = tl.where(begin + i < end, d_z, 0.0)
            if place is None:
                new_sums = ()
                for j in tl.static_range(W):
                    new_sums = new_sums + (sums[j] + own_d_z * seen[j],)
                sums = new_sums
                after = after + (d_z,)
                d_z = taps[0] * after[W - 1]
                for j in tl.static_range(1, W):
                    d_z += taps[j] * after[W - 1 - j]
            else:
                at = tl.load(place + i, mask=valid & (begin + i < last), other=0)
                new_sums = ()
                for j in tl.static_range(W):
                    new_sums = new_sums + (sums[j] + tl.where(at >= W - 1 - j, own_d_z * seen[j], 0.0),)
                sums = new_sums
                after, places = after + (d_z,), places + (at,)
                d_z = taps[W - 1] * after[0]
                for j in tl.static_range(1, W):
                    d_z += tl.where(places[j] >= j, taps[W - 1 - j] * after[j], 0.0)
                places = places[1:]
            after = after[1:]
        seen = seen[1:]
        s = begin + (i - MORE)
        tl.store(d_x + (i - MORE) * P, d_z.to(d_x.dtype.element_ty), mask=own_mask & (s < end) & (i >= MORE))
        if past is not None:
            tl.store(d_past + i * C, d_z.to(d_past.dtype.element_ty), mask=own_mask & (begin == 0) & (i < MORE))
    for j in tl.static_range(W):
        total = tl.sum(sums[j], 0)[None, :, :]
        tl.store(d_w + (program * W + j) * C + FIRST + column, total, mask=mask)


@triton.jit
@no_type_check
def rows(row_block, run, length, segments, span, sequences, ROWS: tl.constexpr):
    """Sequence, first token and end of each of ROWS rows of a run, and which rows exist; all are [ROWS, 1, 1].

    A sequence is cut into `segments` of `span` tokens, the last ones shorter or empty.
    """
    i = (row_block * ROWS + tl.arange(0, ROWS))[:, None, None]
    begin = i % segments * span
    sequence = run.to(tl.int64) * sequences + i // segments
    return sequence, begin, tl.minimum(begin + span, length), (i < sequences * segments) & (begin < length)


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def forward(
    x, w, past, place, outs, length, segments, span, sequences,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Computes a block of a part of ROWS rows of a run. Blocks of the same rows are neighbours in the grid."""
    block, row_block, run = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.program_id(1)
    sequence, begin, end, valid = rows(row_block, run, length, segments, span, sequences, ROWS)
    for i in tl.static_range(len(PARTS)):
        if (block >= PARTS[i][0]) & (block < PARTS[i][1]):
            read(
                x, w, past, place, outs[i], run, sequence, begin, end, valid, length, span, block - PARTS[i][0],
                P, C, *PARTS[i][2:],
            )  # fmt: skip


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def backward(
    x, w, past, place, d_outs, d_x, d_past, d_w, length, segments, span, sequences,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The backward of `forward`, on its grid. d_w [n, programs of a block, W, C]."""
    block, row_block, run = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.program_id(1)
    sequence, begin, end, valid = rows(row_block, run, length, segments, span, sequences, ROWS)
    program = run.to(tl.int64) * (tl.num_programs(0) // BLOCKS) + row_block
    for i in tl.static_range(len(PARTS)):
        if (block >= PARTS[i][0]) & (block < PARTS[i][1]):
            read_backward(
                x, w, past, place, d_outs[i], d_x, d_past, d_w, run, program, sequence, begin, end, valid, length, span,
                block - PARTS[i][0], ROWS, P, C, *PARTS[i][2:],
            )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How one problem is divided into rows of tokens and blocks of channels.

    Attributes:
        runs: Models of a stack.
        sequences: Sequences of a run.
        length: Tokens of a sequence.
        segments: Parts of a sequence that rows walk along.
        rows: Rows of a program.
        parts: For each of q, k, v, gate and rest: its first block, the block after its last one, and the arguments of
            `read` from W on.
        channels: The widths of q, k and v together.
    """

    runs: int
    sequences: int
    length: int
    segments: int
    rows: int
    parts: tuple[tuple[int | bool, ...], ...]
    channels: int

    @classmethod
    def of(cls, x: Tensor, w: Tensor | None, widths: Sequence[int], key_dim: int, silu: int, unit: bool) -> "Tiling":
        """The tiling of x [n, B, T, P] for the arguments of `convolve`."""
        return planned(cls._of, *x.shape[:3], 0 if w is None else w.shape[1], tuple(widths), key_dim, silu, unit)

    @classmethod
    def _of(
        cls, runs: int, sequences: int, length: int, window: int, widths: tuple[int, ...], key_dim: int, silu: int,
        unit: bool,
    ) -> "Tiling":  # fmt: skip
        """The tiling, for a convolution of width `window`, which is 0 without one."""
        head = triton.next_power_of_2(key_dim)
        lanes = max(LANES, head)
        parts, column, block = [], 0, 0
        for i, width in enumerate(widths):
            group, groups, width_of_lanes = (key_dim, lanes // head, head) if unit and i < 2 else (lanes, 1, lanes)
            if i == 4:
                group = width_of_lanes = min(lanes, triton.next_power_of_2(width or 1))
            last = block + triton.cdiv(width, group * groups)
            taps = 0 if i > 2 else window
            parts.append((block, last, taps, column, width, group, groups, width_of_lanes, i < silu, unit and i < 2))
            column, block = column + width, last
        rows = max(1, TILE // (lanes * triton.next_power_of_2(max(4, parts[0][2]))))
        most = runs * sequences * length * block // (rows * PROGRAMS)
        segments = triton.cdiv(length, min(max(most, 8), 64))
        return cls(runs, sequences, length, segments, rows, tuple(parts), sum(widths[:3]))

    @property
    def programs(self) -> int:
        """Number of programs for each block of each run."""
        return -(-self.sequences * self.segments // self.rows)

    @property
    def grid(self) -> tuple[int, int]:
        """The grid of both kernels."""
        return self.parts[-1][1] * self.programs, self.runs

    def sizes(self, x: Tensor) -> dict[str, Any]:
        """Arguments that follow from the tiling, by name."""
        return {
            "length": self.length, "segments": self.segments, "span": triton.cdiv(self.length, self.segments),
            "sequences": self.sequences, "PARTS": self.parts, "BLOCKS": self.parts[-1][1], "ROWS": self.rows,
            "P": x.shape[-1], "C": self.channels,
        }  # fmt: skip


@torch.library.custom_op("deltalab::convolve", mutates_args=())
def convolve(
    x: Tensor,
    w: Tensor | None,
    past: Tensor | None,
    widths: Sequence[int],
    key_dim: int,
    silu: int,
    unit: bool,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Splits x into q, k, v, gate and rest, computing in fp32.

    q, k and v are sum_i w_i x_{t - W + 1 + i}, or x itself without w, and then get SiLU and unit norm. The gate is
    unchanged, and the rest is in fp32.

    Args:
        x: [n, B, T, P] in bf16, fp16 or fp32.
        w: The weights [n, W, C], where C is the width of q, k and v together; None for no convolution.
        past: The W - 1 tokens before the first x, [n, B, W - 1, C]; None for zeros.
        widths: The widths of q, k, v, gate and rest, P in all.
        key_dim: K.
        silu: How many of q, k and v get SiLU, counted from q on.
        unit: Whether each K channels of q and k, which must get SiLU, are divided by their norm, at least 1e-6.
        place: The number of each token within its sequence, int32 [n, B, T], where rows hold several sequences without
            a past. The convolution of each sequence sees its own tokens alone.

    Returns:
        q, k, v, gate and rest, [n, B, T, width] each, or [n, 0] if the width is 0.
    """
    q, k, v, gate, rest = outputs = _outputs(x=x, widths=widths)
    tiling = Tiling.of(x, w, widths, key_dim, silu, unit)
    x, w, past, place = x.contiguous(), _contiguous(w), _contiguous(past), _contiguous(place)
    launch(forward, tiling.grid, {"x": x, "w": w, "past": past, "place": place, "outs": outputs}, tiling.sizes(x))
    return q, k, v, gate, rest


def _outputs(*, x: Tensor, widths: Sequence[int], **_: Any) -> tuple[Tensor, ...]:
    dtypes = (*[x.dtype] * 4, torch.float32)
    return tuple(
        x.new_empty(*x.shape[:3], width, dtype=dtype) if width else absent(x)
        for width, dtype in zip(widths, dtypes, strict=True)
    )


def _contiguous(x: Tensor | None) -> Tensor | None:
    """The tensor, contiguous."""
    return None if x is None else x.contiguous()


@torch.library.custom_op("deltalab::convolve_backward", mutates_args=())
def _backward(
    x: Tensor,
    w: Tensor | None,
    past: Tensor | None,
    d_q: Tensor | None,
    d_k: Tensor | None,
    d_v: Tensor | None,
    d_gate: Tensor | None,
    d_rest: Tensor | None,
    widths: Sequence[int],
    key_dim: int,
    silu: int,
    unit: bool,
    place: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, w and past in their dtypes; [n, 0] for what was not given."""
    tiling = Tiling.of(x, w, widths, key_dim, silu, unit)
    d_x, d_w, d_past = _gradients(x=x, w=w, past=past)
    program_d_w = None if w is None else w.new_empty(tiling.runs, tiling.programs, *w.shape[1:], dtype=torch.float32)
    d_outs = tuple(
        torch.zeros_like(out) if gradient is None else gradient.contiguous()
        for gradient, out in zip((d_q, d_k, d_v, d_gate, d_rest), _outputs(x=x, widths=widths), strict=True)
    )
    x, w, past, place = x.contiguous(), _contiguous(w), _contiguous(past), _contiguous(place)
    operands = {
        "x": x, "w": w, "past": past, "place": place,
        "d_outs": d_outs, "d_x": d_x, "d_past": existing(d_past), "d_w": program_d_w,
    }  # fmt: skip
    launch(backward, tiling.grid, operands, tiling.sizes(x))
    return d_x, d_w if program_d_w is None else program_d_w.sum(1).to(d_w.dtype), d_past


def _gradients(*, x: Tensor, w: Tensor | None, past: Tensor | None, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        absent(x) if w is None else w.new_empty(w.shape),
        absent(x) if past is None else past.new_empty(past.shape),
    )


register(_backward, shapes=_gradients)
register(convolve, shapes=_outputs, backward=_backward, outputs=["q", "k", "v", "gate", "rest"])
