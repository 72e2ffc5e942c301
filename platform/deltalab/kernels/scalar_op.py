"""`kernels.scalar` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from deltalab.kernels import scalar
from deltalab.kernels.chunk import absent, chunk_map, fold_into_batch, needs_fp64
from deltalab.kernels.scalar_gradients import gradients

WORKSPACE = 64 * 2**20
"""Bytes that the states of a segment may take in the backward; a segment has fewer only where it would idle the GPU."""


@dataclass(frozen=True)
class Launch:
    """The plan of one problem: sizes of blocks and of segments, and the grid."""

    batch: int
    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    steps: int
    size: int
    bk: int
    bv: int
    chunks: int
    every: int
    packed: tuple[Tensor, Tensor, Tensor] | None
    precision: str

    @classmethod
    def of(cls, r: Tensor, k: Tensor, u: Tensor, cu_seqlens: Tensor | None, steps: int, chunk_size: int) -> "Launch":
        batch, tokens, heads, key_dim = k.shape
        value_dim = u.shape[-1]
        size = chunk_size
        packed = None
        chunks = triton.cdiv(tokens, size)
        sequences = batch
        if cu_seqlens is not None:
            bounds = (cu_seqlens * steps).to(torch.int32)
            of, first, chunks = chunk_map(bounds, tokens, size)
            packed = (bounds, of, first)
            sequences = bounds.numel() - 1
        each = max(1, sequences * heads * key_dim * value_dim * k.element_size())
        every = chunks if packed else min(chunks, max(WORKSPACE // each, 8, triton.cdiv(1024, sequences * heads)))
        wide = k.element_size() > 2
        return cls(
            sequences, tokens, heads, key_dim, value_dim, steps, size,
            bk=max(16, triton.next_power_of_2(key_dim)),
            bv=max(16, min(32 if wide else 64, triton.next_power_of_2(value_dim))),
            chunks=chunks, every=every, packed=packed, precision="ieee" if wide else "tf32",
        )  # fmt: skip

    @property
    def segments(self) -> int:
        return triton.cdiv(self.chunks, self.every)

    @property
    def all_chunks(self) -> int:
        return self.chunks if self.packed else self.batch * self.chunks

    def sequence(self) -> dict[str, Any]:
        bounds, of, first = self.packed or (None, None, None)
        # Packed, lengths come from the bounds.
        return {"cu_seqlens": bounds, "first": first, "length": self.tokens, "chunks": self.chunks}

    def sizes(self, late: bool, loss: str | None) -> dict[str, Any]:
        return {
            "H": self.heads, "K": self.key_dim, "V": self.value_dim, "SIZE": self.size, "BK": self.bk, "BV": self.bv,
            "FULL": self.bk == self.key_dim, "FULL_V": self.value_dim % self.bv == 0, "LATE": late,
            "STEPS": self.steps, "LOSS": loss, "PACKED": self.packed is not None, "PRECISION": self.precision,
        }  # fmt: skip


WARPS = {"prepare": 2, "scan": 4, "reverse": 4, "gradients": 8}
STAGES = {"prepare": 1, "scan": 3, "reverse": 2, "gradients": 1}


def _how(kernel: str) -> dict[str, int]:
    return {"num_warps": WARPS[kernel], "num_stages": STAGES[kernel]}


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
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    steps: int,
    loss: str | None,
    clip: float,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scan of a state that decays by a scalar, as `rule.Operands` and `structure.Transition` define it.

    Contiguous r [B, T, H, K], k [B, n T, H, K], u [B, n T, H, V], scalars [B, n T, H], state [B, H, K, V] (of which
    there are N where cu_seqlens [N + 1] packs N sequences into B = 1).
    With a loss it reads S_{t-1}, and gives besides the pseudo-residual of target - S_{t-1}^T k.
    keep: whether what the backward needs is returned.
    Returns (o, residual, last state, and, for the backward, cumulative log-decays, inverses and states).
    """
    x = Launch.of(r, k, u, cu_seqlens, steps, chunk_size)
    o = u.new_empty(*r.shape[:3], x.value_dim)
    residual = torch.empty_like(u) if loss else absent(u)
    last = u.new_empty(x.batch, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)
    cumulative, inverse, begin = absent(u), absent(u), absent(u)
    if g is not None:
        cumulative = torch.empty_like(g, dtype=torch.float64 if needs_fp64(u) else torch.float32)
    if e is not None:
        inverse = k.new_empty(x.all_chunks, x.heads, x.size, x.size)
    if keep:
        begin = last.new_empty(x.batch, x.segments, x.heads, x.value_dim, x.key_dim)
    if g is not None or e is not None:
        bounds, of, first = x.packed or (None, None, None)
        scalar.prepare[(x.all_chunks, x.heads)](
            k, g, e, _or_none(cumulative), _or_none(inverse),
            bounds, of, first, x.tokens, x.chunks, x.batch, x.heads, x.key_dim,
            x.size, x.bk, x.bk == x.key_dim, late, x.packed is not None, x.precision, **_how("prepare"),
        )  # fmt: skip
    scalar.scan[(triton.cdiv(x.value_dim, x.bv), x.heads, x.batch)](
        r, k, u, e, beta, read, d, _or_none(cumulative), _or_none(inverse), target, state, _or_none(begin),
        o, _or_none(residual), last, None, None,
        **x.sequence(), from_chunk=0, to_chunk=x.chunks, every=x.every, segments=x.segments,
        scale=scale, clip=clip, **x.sizes(late, loss), **_how("scan"),
    )  # fmt: skip
    return o, residual, last, cumulative, inverse, begin


def _or_none(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


@scalar_scan.register_fake
def _(
    r, k, u, g, e, beta, read, d, target, state, cu_seqlens, scale, late, steps, loss, clip, chunk_size, keep
):  # type: ignore[no-untyped-def]  # fmt: skip
    x = Launch.of(r, k, u, cu_seqlens, steps, chunk_size)
    last = u.new_empty(x.batch, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)
    return (
        u.new_empty(*r.shape[:3], x.value_dim),
        torch.empty_like(u) if loss else absent(u),
        last,
        absent(u) if g is None else torch.empty_like(g, dtype=torch.float64 if needs_fp64(u) else torch.float32),
        absent(u) if e is None else k.new_empty(x.all_chunks, x.heads, x.size, x.size),
        last.new_empty(x.batch, x.segments, x.heads, x.value_dim, x.key_dim) if keep else absent(u),
    )


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
    cumulative: Tensor,
    inverse: Tensor,
    begin: Tensor,
    d_o: Tensor,
    d_residual: Tensor | None,
    d_last: Tensor | None,
    scale: float,
    late: bool,
    steps: int,
    loss: str | None,
    clip: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r, k, u, g, e, beta, read, d, target and the state; empty for what was not given."""
    x = Launch.of(r, k, u, cu_seqlens, steps, chunk_size)
    like = [absent(u) if x is None else torch.empty_like(x) for x in (r, k, u, g, e, beta, read, d, residual)]
    d_r, d_k, d_u, d_g, d_e, d_beta, d_read, d_d, d_target = like
    if d_last is None:
        after = begin.new_zeros(x.batch, x.heads, x.value_dim, x.key_dim)
    else:
        after = d_last.float().transpose(-1, -2).contiguous()
    spans = x.all_chunks if x.packed else x.batch * x.every
    states = k.new_empty(spans, x.heads, x.value_dim, x.key_dim)
    states_after = torch.empty_like(states)
    written = torch.empty_like(u) if e is not None else None
    bounds, of, first = x.packed or (None, None, None)
    grid = (triton.cdiv(x.value_dim, x.bv), x.heads, x.batch)
    sums, solve = _or_none(cumulative), _or_none(inverse)
    for segment in reversed(range(x.segments)):
        span = (segment * x.every, min((segment + 1) * x.every, x.chunks))
        at = {**x.sequence(), "from_chunk": span[0], "to_chunk": span[1]}
        scalar.scan[grid](
            r, k, u, e, beta, read, d, sums, solve, None, None, begin, None, None, None, states, written,
            **at, every=x.every, segments=x.segments, scale=scale, clip=clip, **x.sizes(late, None), **_how("scan"),
        )  # fmt: skip
        scalar.reverse[grid](
            r, k, e, read, d, sums, solve, d_o, residual, d_residual, after, states_after, d_u, after,
            **at, scale=scale, clip=clip, **x.sizes(late, loss), **_how("reverse"),
        )  # fmt: skip
        long = span[1] - span[0]
        gradients[(x.chunks if x.packed else x.batch * long, x.heads)](
            r, k, u, e, beta, read, d, sums, written, states, states_after, d_o, residual, d_residual,
            d_u, d_r, d_k, _or_none(d_g), _or_none(d_e), _or_none(d_beta), _or_none(d_read), _or_none(d_d),
            _or_none(d_target),
            bounds, of, first, x.tokens, x.chunks, span[0], long, x.batch, scale, clip,
            **x.sizes(late, loss), **_how("gradients"),
        )  # fmt: skip
    return [*like, after.transpose(-1, -2).contiguous()]


@_backward.register_fake
def _(
    r, k, u, g, e, beta, read, d, cu_seqlens, residual, cumulative, inverse, begin, d_o, d_residual, d_last,
    scale, late, steps, loss, clip, chunk_size,
):  # type: ignore[no-untyped-def]  # fmt: skip
    like = [absent(u) if x is None else torch.empty_like(x) for x in (r, k, u, g, e, beta, read, d, residual)]
    x = Launch.of(r, k, u, cu_seqlens, steps, chunk_size)
    return [*like, begin.new_empty(x.batch, x.heads, x.key_dim, x.value_dim)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, target, state, cu_seqlens, scale, late, steps, loss, clip, chunk_size, _ = inputs
    _, residual, _, cumulative, inverse, begin = output
    ctx.save_for_backward(*tensors, cu_seqlens, residual if loss else None, cumulative, inverse, begin)
    ctx.rest = (scale, late, steps, loss, clip, chunk_size)
    ctx.given = [tensor is not None for tensor in (*tensors, target, state)]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_o: Tensor | None, d_residual: Tensor | None, d_last: Tensor | None, *_: Any) -> Any:
    r, k, u = ctx.saved_tensors[:3]
    if d_o is None:
        d_o = u.new_zeros(*r.shape[:3], u.shape[-1])
    if ctx.rest[3] and d_residual is None:
        d_residual = torch.zeros_like(u)
    d_residual = None if d_residual is None or not ctx.rest[3] else d_residual.contiguous()
    found = _backward(*ctx.saved_tensors, d_o.contiguous(), d_residual, d_last, *ctx.rest)
    grads = [one if given else None for one, given in zip(found, ctx.given, strict=True)]
    return (*grads, *[None] * 8)


scalar_scan.register_autograd(_differentiate, setup_context=_remember)
fold_into_batch(scalar_scan)
fold_into_batch(_backward)

