"""Splits one product of x into q, k, v, gate and rest in one pass: short convolution, SiLU and unit norm on the way.

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
from deltalab.kernels.compiled import launch
from deltalab.kernels.launch import planned
from deltalab.kernels.register import absent, existing, register

EPS = tl.constexpr(1e-6)
"""The least norm that a vector is divided by."""

AHEAD = tl.constexpr(2)
AHEAD_BACKWARD = tl.constexpr(6)
"""Tokens that a row loads ahead. The backward has fewer warps at a time, whose loads must hide each other's wait."""

LANES = 64
"""The fewest channels of a program, 128 bytes of a row in 16 bits. It holds a whole head if that is wider."""

TILE = 2048
"""Elements of a program: the tokens that a convolution sees at a time, of all rows; 16 for each thread of 4 warps."""

PROGRAMS = 1024
"""Programs that keep a GPU busy. Rows walk along at most 64 tokens, and along fewer to make as many programs."""


@triton.jit
@no_type_check
def columns(block, WIDTH: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """[1, GROUPS, LANES]: columns of a part of WIDTH columns, in groups of GROUP, and which of them exist."""
    group = block * GROUPS + tl.arange(0, GROUPS)[None, :, None]
    lane = tl.arange(0, LANES)[None, None, :]
    column = group * GROUP + lane
    return column, (lane < GROUP) & (column < WIDTH)


@triton.jit
@no_type_check
def weights(w, run, column, there, C: tl.constexpr, W: tl.constexpr):
    taps = ()
    for i in tl.static_range(W):
        taps = taps + (tl.load(w + (run * W + i) * C + column, mask=there, other=0.0).to(tl.float32),)
    return taps


@triton.jit
@no_type_check
def earlier(at, past, begin, there, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """The W - 1 tokens before those that `at` points to. Before the sequence, those of `past`, or 0."""
    seen = ()
    for i in tl.static_range(1, W):
        t = begin - W + i
        found = tl.load(at - (W - i) * P, mask=there & (t >= 0), other=0.0)
        if past is not None:
            found += tl.load(past + (t + W - 1) * C, mask=there & (t < 0), other=0.0)
        seen = seen + (found.to(tl.float32),)
    return seen


@triton.jit
@no_type_check
def convolved(seen, taps, place, i, there, W: tl.constexpr):
    """sum_i taps_i seen_i over the tokens of one sequence, or the token itself without a convolution."""
    if W == 0:
        z = seen[0]
    elif place is None:
        z = taps[0] * seen[0]
        for j in tl.static_range(1, W):
            z += taps[j] * seen[j]
    else:
        at = tl.load(place + i, mask=there, other=0)
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
    """Computes one block of one part: out [.., WIDTH] from columns FIRST and on of x."""
    column, there = columns(block, WIDTH, GROUP, GROUPS, LANES)
    taps = weights(w, run, FIRST + column, there, C, W)
    there = there & valid
    row = sequence * length + begin
    x += row * P + FIRST + column
    out += row * WIDTH + column
    if place is not None:
        place += row
    if past is not None:
        past += sequence * ((W - 1) * C) + FIRST + column
    seen = earlier(x, past, begin, there, P, C, W)
    coming = ()
    for i in tl.static_range(AHEAD):
        coming = coming + (tl.load(x + i * P, mask=there & (begin + i < end), other=0.0),)
    for i in range(span):
        later = there & (begin + i + AHEAD < end)
        coming = coming + (tl.load(x + (i + AHEAD) * P, mask=later, other=0.0),)
        seen = seen + (coming[0].to(tl.float32),)
        coming = coming[1:]
        y = convolved(seen, taps, place, i, valid & (begin + i < end), W)
        if SILU:
            y *= tl.sigmoid(y)
        if UNIT:
            y *= 1 / tl.maximum(tl.sqrt(tl.sum(y * y, 2, keep_dims=True)), EPS)
        tl.store(out + i * WIDTH, y.to(out.dtype.element_ty), mask=there & (begin + i < end))
        seen = seen[1:]


@triton.jit
@no_type_check
def read_backward(
    x, w, past, place, d_out, d_x, d_past, d_w, run, mine, sequence, begin, end, valid, length, span, block,
    ROWS: tl.constexpr, P: tl.constexpr, C: tl.constexpr, W: tl.constexpr, FIRST: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr, SILU: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The backward of `read`. d x_s = sum_i w_i d z_{s + W - 1 - i}, so a row walks W - 1 tokens beyond its part."""
    MORE: tl.constexpr = W - 1 if W else 0
    column, there = columns(block, WIDTH, GROUP, GROUPS, LANES)
    taps = weights(w, run, FIRST + column, there, C, W)
    own = there & valid
    row = sequence * length + begin
    x += row * P + FIRST + column
    d_x += row * P + FIRST + column
    d_out += row * WIDTH + column
    if place is not None:
        place += row
    if past is not None:
        past += sequence * (MORE * C) + FIRST + column
        d_past += sequence * (MORE * C) + FIRST + column
    seen = earlier(x, past, begin, own, P, C, W)
    none = tl.zeros([ROWS, GROUPS, LANES], dtype=tl.float32)
    after = ()
    for _ in tl.static_range(1, W):
        after = after + (none,)
    stood = ()
    if place is not None:
        for _ in tl.static_range(1, W):
            stood = stood + (tl.zeros([ROWS, 1, 1], dtype=tl.int32),)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (none,)
    last = tl.minimum(end + MORE, length)
    coming, d_coming = (), ()
    for i in tl.static_range(AHEAD_BACKWARD):
        later = own & (begin + i < last)
        coming = coming + (tl.load(x + i * P, mask=later, other=0.0),)
        d_coming = d_coming + (tl.load(d_out + i * WIDTH, mask=later, other=0.0),)
    for i in range(span + MORE):
        later = own & (begin + i + AHEAD_BACKWARD < last)
        coming = coming + (tl.load(x + (i + AHEAD_BACKWARD) * P, mask=later, other=0.0),)
        d_coming = d_coming + (tl.load(d_out + (i + AHEAD_BACKWARD) * WIDTH, mask=later, other=0.0),)
        seen = seen + (coming[0].to(tl.float32),)
        d_z = d_coming[0].to(tl.float32)
        coming, d_coming = coming[1:], d_coming[1:]
        if SILU:
            z = convolved(seen, taps, place, i, valid & (begin + i < last), W)
            share = tl.sigmoid(z)
            if UNIT:
                y = z * share
                size = tl.sqrt(tl.sum(y * y, 2, keep_dims=True))
                over = 1 / tl.maximum(size, EPS)
                y *= over
                along = tl.where(size > EPS, tl.sum(y * d_z, 2, keep_dims=True), 0.0)
                d_z = over * (d_z - along * y)
            d_z *= share * (1 + z * (1 - share))
        if W > 0:
            here = tl.where(begin + i < end, d_z, 0.0)
            if place is None:
                more = ()
                for j in tl.static_range(W):
                    more = more + (sums[j] + here * seen[j],)
                sums = more
                after = after + (d_z,)
                d_z = taps[0] * after[W - 1]
                for j in tl.static_range(1, W):
                    d_z += taps[j] * after[W - 1 - j]
            else:
                at = tl.load(place + i, mask=valid & (begin + i < last), other=0)
                more = ()
                for j in tl.static_range(W):
                    more = more + (sums[j] + tl.where(at >= W - 1 - j, here * seen[j], 0.0),)
                sums = more
                after, stood = after + (d_z,), stood + (at,)
                d_z = taps[W - 1] * after[0]
                for j in tl.static_range(1, W):
                    d_z += tl.where(stood[j] >= j, taps[W - 1 - j] * after[j], 0.0)
                stood = stood[1:]
            after = after[1:]
        seen = seen[1:]
        s = begin + (i - MORE)
        tl.store(d_x + (i - MORE) * P, d_z.to(d_x.dtype.element_ty), mask=own & (s < end) & (i >= MORE))
        if past is not None:
            tl.store(d_past + i * C, d_z.to(d_past.dtype.element_ty), mask=own & (begin == 0) & (i < MORE))
    for j in tl.static_range(W):
        total = tl.sum(sums[j], 0)[None, :, :]
        tl.store(d_w + (mine * W + j) * C + FIRST + column, total, mask=there)


@triton.jit
@no_type_check
def rows(at, run, length, segments, span, sequences, ROWS: tl.constexpr):
    """For a run's `at`-th ROWS rows, [ROWS, 1, 1]: sequence, first token, end, and which rows exist.

    A sequence is cut into `segments` of `span` tokens, the last ones shorter or empty.
    """
    i = (at * ROWS + tl.arange(0, ROWS))[:, None, None]
    begin = i % segments * span
    sequence = run.to(tl.int64) * sequences + i // segments
    return sequence, begin, tl.minimum(begin + span, length), (i < sequences * segments) & (begin < length)


@triton.jit(do_not_specialize=MOVES)
@no_type_check
def forward(
    x, w, past, place, outs, length, segments, span, sequences,
    PARTS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program for each block of each part of ROWS rows of a run. Blocks of the same rows are grid neighbours."""
    block, at, run = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.program_id(1)
    sequence, begin, end, valid = rows(at, run, length, segments, span, sequences, ROWS)
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
    block, at, run = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS, tl.program_id(1)
    sequence, begin, end, valid = rows(at, run, length, segments, span, sequences, ROWS)
    mine = run.to(tl.int64) * (tl.num_programs(0) // BLOCKS) + at
    for i in tl.static_range(len(PARTS)):
        if (block >= PARTS[i][0]) & (block < PARTS[i][1]):
            read_backward(
                x, w, past, place, d_outs[i], d_x, d_past, d_w, run, mine, sequence, begin, end, valid, length, span,
                block - PARTS[i][0], ROWS, P, C, *PARTS[i][2:],
            )  # fmt: skip


@dataclass(frozen=True)
class Tiling:
    """How one problem is divided into rows of tokens and blocks of channels.

    parts: for q, k, v, gate and rest, the first block, the end of its blocks, and the arguments of `read` from W on.
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
        return planned(cls._of, *x.shape[:3], 0 if w is None else w.shape[1], tuple(widths), key_dim, silu, unit)

    @classmethod
    def _of(
        cls, runs: int, sequences: int, length: int, window: int, widths: tuple[int, ...], key_dim: int, silu: int,
        unit: bool,
    ) -> "Tiling":  # fmt: skip
        """window: width of the convolution, 0 without one."""
        head = triton.next_power_of_2(key_dim)
        lanes = max(LANES, head)
        parts, column, block = [], 0, 0
        for i, width in enumerate(widths):
            group, groups, own = (key_dim, lanes // head, head) if unit and i < 2 else (lanes, 1, lanes)
            if i == 4:
                group = own = min(lanes, triton.next_power_of_2(width or 1))
            last = block + triton.cdiv(width, group * groups)
            taps = 0 if i > 2 else window
            parts.append((block, last, taps, column, width, group, groups, own, i < silu, unit and i < 2))
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
        return self.parts[-1][1] * self.programs, self.runs

    def sizes(self, x: Tensor) -> dict[str, Any]:
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
    """Splits x [n, B, T, P] in bf16, fp16 or fp32 into q, k, v, gate and rest with these widths, P in all.

    q, k and v: sum_i w_i x_{t - W + 1 + i} for w [n, W, C], with past [n, B, W - 1, C], or 0, before the first x; x
    itself without w. silu: how many of them get SiLU then, counted from q on. unit: whether each `key_dim` channels of
    q and k, which must get SiLU, are then divided by their norm, which is at least 1e-6. The gate is unchanged, the
    rest in fp32. Computes in fp32.
    place: the number of each token within its sequence, int32 [n, B, T], where rows hold several sequences without a
    past: the convolution of each sees its own tokens alone.
    Returns [n, B, T, width] for each, or [n, 0] for a width of 0.
    """
    q, k, v, gate, rest = found = _outputs(x=x, widths=widths)
    tiling = Tiling.of(x, w, widths, key_dim, silu, unit)
    x, w, past, place = x.contiguous(), _contiguous(w), _contiguous(past), _contiguous(place)
    launch(forward, tiling.grid, {"x": x, "w": w, "past": past, "place": place, "outs": found}, tiling.sizes(x))
    return q, k, v, gate, rest


def _outputs(*, x: Tensor, widths: Sequence[int], **_: Any) -> tuple[Tensor, ...]:
    kinds = (*[x.dtype] * 4, torch.float32)
    return tuple(
        x.new_empty(*x.shape[:3], width, dtype=kind) if width else absent(x)
        for width, kind in zip(widths, kinds, strict=True)
    )


def _contiguous(x: Tensor | None) -> Tensor | None:
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
    parts = None if w is None else w.new_empty(tiling.runs, tiling.programs, *w.shape[1:], dtype=torch.float32)
    d_outs = tuple(
        torch.zeros_like(out) if given is None else given.contiguous()
        for given, out in zip((d_q, d_k, d_v, d_gate, d_rest), _outputs(x=x, widths=widths), strict=True)
    )
    x, w, past, place = x.contiguous(), _contiguous(w), _contiguous(past), _contiguous(place)
    operands = {
        "x": x, "w": w, "past": past, "place": place,
        "d_outs": d_outs, "d_x": d_x, "d_past": existing(d_past), "d_w": parts,
    }  # fmt: skip
    launch(backward, tiling.grid, operands, tiling.sizes(x))
    return d_x, d_w if parts is None else parts.sum(1).to(d_w.dtype), d_past


def _gradients(*, x: Tensor, w: Tensor | None, past: Tensor | None, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        absent(x) if w is None else w.new_empty(w.shape),
        absent(x) if past is None else past.new_empty(past.shape),
    )


register(_backward, shapes=_gradients)
register(convolve, shapes=_outputs, backward=_backward, outputs=["q", "k", "v", "gate", "rest"])
