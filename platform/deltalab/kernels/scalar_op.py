"""`kernels.scalar` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels import scalar
from deltalab.kernels.chunk import PRECISIONS, absent, chunk_map, fold_into_batch, tiles
from deltalab.kernels.scalar_gradients import gradients

WORKSPACE = 128 * 2**20
"""Bytes that the states of a segment may take in the backward; a segment has fewer only where it would idle the GPU."""


ENOUGH = 96
"""Programs that keep a GPU busy, so that each may take 128 values instead of 64 and read the keys half as often."""

WARPS = {"prepare": 4, "scan": 4, "states": 4, "reverse": 4, "gradients": 4}
STAGES = {"prepare": 1, "scan": 3, "states": 3, "reverse": 3, "gradients": 2}


@dataclass(frozen=True)
class Launch:
    """The plan of one problem: sizes of blocks and of segments, and where its sequences lie."""

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    size: int
    bk: int
    bv: int
    chunks: int
    every: int
    packed: tuple[Tensor, Tensor, Tensor] | None
    ragged: bool
    precision: str

    @classmethod
    def of(cls, k: Tensor, u: Tensor, cu_seqlens: Tensor | None, size: int, loss: str | None) -> "Launch":
        batch, tokens, heads, key_dim = k.shape
        value_dim = u.shape[-1]
        chunks, packed = triton.cdiv(tokens, size), None
        if cu_seqlens is not None:
            of, first, chunks = chunk_map(cu_seqlens, tokens, size)
            packed, batch = (cu_seqlens.to(torch.int32), of, first), cu_seqlens.numel() - 1
        each = batch * heads * key_dim * value_dim * k.element_size()
        every = chunks if packed else min(chunks, max(WORKSPACE // each, 8, triton.cdiv(1024, batch * heads)))
        wide = k.element_size() > 2
        blocks = (32, 16) if wide else (128, 64, 32, 16)
        bv = next(bv for bv in blocks if value_dim % bv == 0)
        if bv == 128 and (key_dim > 128 or loss or batch * heads * value_dim < ENOUGH * bv):
            bv = 64
        return cls(
            batch, tokens, heads, key_dim, value_dim, size, key_dim, bv, chunks, every, packed,
            ragged=packed is not None or tokens % size != 0, precision=PRECISIONS[u.dtype],
        )  # fmt: skip

    def per_chunk(self) -> "Launch":
        """The same with blocks for `gradients`: of keys, with all values at once."""
        blocks = (32, 16) if self.precision == "ieee" else (128, 64, 32, 16)
        return replace(self, bk=min(self.key_dim, 32), bv=next(bv for bv in blocks if self.value_dim % bv == 0))

    @property
    def segments(self) -> int:
        return triton.cdiv(self.chunks, self.every)

    @property
    def all_chunks(self) -> int:
        return self.chunks if self.packed else self.batch * self.chunks

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.value_dim // self.bv, self.heads, self.batch

    def keys(self, x: Tensor | None, *, store: bool = False) -> Any:
        return tiles(x, self.size, self.bk, store=store, ragged=self.ragged)

    def values(self, x: Tensor | None, *, store: bool = False) -> Any:
        return tiles(x, self.size, self.bv, store=store, ragged=self.ragged)

    def squares(self, x: Tensor) -> Any:
        return tiles(x.flatten(0, 1), self.size, self.size) if x.numel() else None

    def states(self, x: Tensor) -> Any:
        return tiles(x.flatten(0, 1), self.bv, self.bk)

    def sequence(self) -> dict[str, Any]:
        bounds, _, first = self.packed or (None, None, None)
        return {"cu_seqlens": bounds, "first": first, "length": self.tokens, "chunks": self.chunks}

    def sizes(self) -> dict[str, Any]:
        return {
            "H": self.heads, "K": self.key_dim, "SIZE": self.size,
            "PACKED": self.packed is not None, "RAGGED": self.ragged, "PRECISION": self.precision,
        }  # fmt: skip

    def how(self, kernel: str, loss: str | None = None) -> dict[str, int]:
        warps, stages = WARPS[kernel], STAGES[kernel]
        if kernel == "gradients" and self.value_dim > self.bv:
            # Its loop would hold all values twice.
            stages = 1
        elif kernel == "reverse" and loss:
            # Three are more than shared memory holds.
            stages = 2
        elif kernel in ("scan", "states", "reverse") and self.bv == 128:
            warps *= 2
        return {"num_warps": warps, "num_stages": stages}

    @property
    def vectors(self) -> torch.dtype:
        """Also of cumulative sums; in fp32 their differences next to extremes would not keep fp32's precision."""
        return torch.float64 if self.precision == "ieee" else torch.float32

    @property
    def sum(self) -> Any:
        return tl.float64 if self.precision == "ieee" else tl.float32


@torch.library.custom_op("deltalab::scalar_scan", mutates_args=())
def scalar_scan(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    target: Tensor | None,
    base: Tensor | None,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    loss: str | None,
    clip: float,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scan of a state that decays by a scalar, as `rule.Operands` and `structure.Transition` define it.

    Contiguous r, k [B, T, H, K], u [B, T, H, V], scalars [B, T, H], state [B, H, K, V] (of which there are N where
    cu_seqlens [N + 1] packs N sequences into B = 1). K is a power of two from 16 on, V a multiple of 16.
    With a loss it reads S_{t-1}, and gives besides the pseudo-residual of target - S_{t-1}^T k.
    base: [B, T, H, V] that o comes on top of.
    keep: whether what the backward needs is returned.
    Returns (o, residual, last state, and what the backward needs: vectors, inverses, P, that of k, and states).
    """
    x = Launch.of(k, u, cu_seqlens, chunk_size, loss)
    found = _outputs(x, r, k, u, e, d, loss, keep)
    o, residual, last, vectors, inverse, within, overlaps, begin = found
    bounds, of, first = x.packed or (None, None, None)
    scalar.prepare[(x.all_chunks, x.heads)](
        x.keys(r), x.keys(k), g, e, beta, read, d, vectors, x.squares(inverse), x.squares(within), x.squares(overlaps),
        bounds, of, first, x.tokens, x.chunks, x.batch, scale, **x.sizes(), LATE=late, FIT=loss is not None, SUM=x.sum,
        **x.how("prepare"),
    )  # fmt: skip
    scalar.scan[x.grid](
        x.keys(r), x.keys(k), x.values(u), vectors, x.squares(inverse), x.squares(within), x.squares(overlaps),
        x.values(target), x.values(base), state, _or_none(begin),
        x.values(o, store=True), x.values(_or_none(residual), store=True), last, None, None,
        **x.sequence(), from_chunk=0, to_chunk=x.chunks, every=x.every, segments=x.segments,
        clip=clip, V=x.value_dim, BV=x.bv, CORRECTED=d is not None, LOSS=loss,
        **x.sizes(), **x.how("scan"),
    )  # fmt: skip
    return found


def _outputs(
    x: Launch, r: Tensor, k: Tensor, u: Tensor, e: Tensor | None, d: Tensor | None, loss: str | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    busy = e is not None or d is not None or loss is not None
    square = (x.all_chunks, x.heads, x.size, x.size)
    last = u.new_empty(x.batch, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)
    return (
        torch.empty_like(u),
        torch.empty_like(u) if loss else absent(u),
        last,
        last.new_empty(x.all_chunks, x.heads, scalar.ROWS.value, x.size, dtype=x.vectors),
        absent(u) if e is None else k.new_empty(square),
        k.new_empty(square) if busy else absent(u),
        k.new_empty(square) if loss else absent(u),
        last.new_empty(x.batch, x.segments, x.heads, x.value_dim, x.key_dim) if keep else absent(u),
    )


def _or_none(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


@scalar_scan.register_fake
def _(
    r, k, u, g, e, beta, read, d, target, base, state, cu_seqlens, scale, late, loss, clip, chunk_size, keep
):  # type: ignore[no-untyped-def]  # fmt: skip
    return _outputs(Launch.of(k, u, cu_seqlens, chunk_size, loss), r, k, u, e, d, loss, keep)


@torch.library.custom_op("deltalab::scalar_scan_backward", mutates_args=())
def _backward(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    cu_seqlens: Tensor | None,
    residual: Tensor | None,
    vectors: Tensor,
    inverse: Tensor,
    within: Tensor,
    overlaps: Tensor,
    begin: Tensor,
    d_o: Tensor,
    d_residual: Tensor | None,
    d_last: Tensor | None,
    scale: float,
    late: bool,
    loss: str | None,
    clip: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r, k, u, g, e, beta, read, d, target and the state; empty for what was not given."""
    x = Launch.of(k, u, cu_seqlens, chunk_size, loss)
    like = [absent(u) if x is None else torch.empty_like(x) for x in (r, k, u, g, e, beta, read, d, residual)]
    d_r, d_k, d_u, d_g, d_e, d_beta, d_read, d_d, d_target = like
    if d_last is None:
        after = begin.new_zeros(x.batch, x.heads, x.value_dim, x.key_dim)
    else:
        after = d_last.float().transpose(-1, -2).contiguous()
    spans = x.all_chunks if x.packed else x.batch * x.every
    states = k.new_empty(spans, x.heads, x.value_dim, x.key_dim)
    states_after = torch.empty_like(states)
    written = None
    if e is not None:
        written = torch.empty_like(u) if x.packed else u.new_empty(x.batch, x.every * x.size, x.heads, x.value_dim)
    solve, pairs, overlap = x.squares(inverse), x.squares(within), x.squares(overlaps)
    keys, values, upstream = x.keys(k), x.values(u), x.values(d_o)
    found, wrong = x.values(residual), x.values(d_residual)
    reverse_d_u = x.values(d_u, store=True)
    wide = x.per_chunk()
    per_chunk = (
        wide.keys(r), wide.keys(k), wide.values(u), g, e, beta, read, d, wide.values(written), wide.states(states),
        wide.states(states_after), wide.values(d_o), wide.values(d_u), wide.values(_or_none(d_target)),
        wide.keys(d_r, store=True), wide.keys(d_k, store=True), wide.values(d_u, store=True), _or_none(d_g),
        _or_none(d_e), _or_none(d_beta), _or_none(d_read), _or_none(d_d),
    )  # fmt: skip
    states, states_after = x.states(states), x.states(states_after)
    size = {**x.sizes(), "V": x.value_dim, "BV": x.bv, "clip": clip}
    for segment in reversed(range(x.segments)):
        begins, ends = segment * x.every, min((segment + 1) * x.every, x.chunks)
        at = {**x.sequence(), "from_chunk": begins, "to_chunk": ends}
        scalar.scan[x.grid](
            None, keys, values, vectors, solve, None, None, None, None, None, begin,
            None, None, None, states, x.values(written, store=True),
            **at, **size, every=x.every, segments=x.segments, CORRECTED=False, LOSS=None, **x.how("states"),
        )  # fmt: skip
        scalar.reverse[x.grid](
            x.keys(r), keys, vectors, solve, pairs, overlap, upstream, found, wrong, after, states_after,
            reverse_d_u, x.values(_or_none(d_target), store=True),
            **at, **size, CORRECTED=d is not None, LOSS=loss, **x.how("reverse", loss),
        )  # fmt: skip
        gradients[(x.chunks if x.packed else x.batch * (ends - begins), x.heads)](
            *per_chunk, **x.sequence(), of=x.packed and x.packed[1], sequences=x.batch, from_chunk=begins,
            span=ends - begins, scale=scale, V=x.value_dim, BV=wide.bv, BK=wide.bk, LATE=late, FIT=loss is not None,
            SUM=x.sum, **x.sizes(), **wide.how("gradients"),
        )  # fmt: skip
    return [*like, after.transpose(-1, -2).contiguous()]


@_backward.register_fake
def _(
    r, k, u, g, e, beta, read, d, cu_seqlens, residual, vectors, inverse, within, overlaps, begin,
    d_o, d_residual, d_last, scale, late, loss, clip, chunk_size,
):  # type: ignore[no-untyped-def]  # fmt: skip
    like = [absent(u) if x is None else torch.empty_like(x) for x in (r, k, u, g, e, beta, read, d, residual)]
    x = Launch.of(k, u, cu_seqlens, chunk_size, loss)
    return [*like, begin.new_empty(x.batch, x.heads, x.key_dim, x.value_dim)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, target, base, state, cu_seqlens, scale, late, loss, clip, chunk_size, _ = inputs
    _, residual, _, *kept = output
    ctx.save_for_backward(*tensors, cu_seqlens, residual if loss else None, *kept)
    ctx.rest = (scale, late, loss, clip, chunk_size)
    ctx.given = [tensor is not None for tensor in (*tensors, target, base, state)]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_o: Tensor | None, d_residual: Tensor | None, d_last: Tensor | None, *_: Any) -> Any:
    r, _k, u = ctx.saved_tensors[:3]
    if d_o is None:
        d_o = u.new_zeros(*r.shape[:3], u.shape[-1])
    if ctx.rest[2] and d_residual is None:
        d_residual = torch.zeros_like(u)
    d_residual = None if d_residual is None or not ctx.rest[2] else d_residual.contiguous()
    *found, d_state = _backward(*ctx.saved_tensors, d_o.contiguous(), d_residual, d_last, *ctx.rest)
    found += [d_o, d_state]
    grads = [one if given else None for one, given in zip(found, ctx.given, strict=True)]
    return (*grads, *[None] * 7)


scalar_scan.register_autograd(_differentiate, setup_context=_remember)
fold_into_batch(scalar_scan)
fold_into_batch(_backward)
