"""`kernels.scalar` as a PyTorch operator: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deltalab.kernels import sequence_parts as parts
from deltalab.kernels.chunk import absent, fold_into_batch
from deltalab.kernels.scalar import forward as scalar
from deltalab.kernels.scalar.backward import gradients
from deltalab.kernels.scalar.launch import Launch

Given = tuple[Tensor | None, ...]
"""r, k, u, g, e, beta, read and d of a pass, or their gradients."""

Kept = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""What the backward of a pass needs: vectors, inverses, P, that of k, states, and what parts make of a state."""


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
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    chunk_size: int,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The scan of a state that decays by a scalar, as `rule.Operands` and `structure.Transition` define it.

    Contiguous r, k [B, T, H, K], u [B, T, H, V], scalars [B, T, H], state [B, H, K, V] (of which there are N where
    cu_seqlens [N + 1] packs N sequences into B = 1). K is a power of two from 16 on, V a multiple of 16.
    keep: whether what the backward needs is returned.
    Returns (o, last state, and what the backward needs).
    """
    x = Launch.of(k, u, cu_seqlens, chunk_size)
    o, last, kept = torch.empty_like(u), _last(x, u), _kept(x, k, e, d, False, keep)
    _forward(x, (r, k, u, g, e, beta, read, d), state, o, last, kept, scale, late)
    return o, last, *kept


@torch.library.custom_op("deltalab::residual_scan", mutates_args=())
def residual_scan(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    target: Tensor | None,
    fit_r: Tensor | None,
    fit_g: Tensor | None,
    fit_e: Tensor | None,
    strength: Tensor,
    fit_read: Tensor | None,
    state: Tensor | None,
    fit_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    late: bool,
    loss: str,
    clip: float,
    chunk_size: int,
    keep: bool,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
]:  # fmt: skip
    """`scalar_scan` that reads S_{t-1}, and on top of its output that of a second state, as `rule.Fit` defines it.

    target, fit_r, fit_g: u, r and g where None, whose gradients then leave as one.
    Returns (o, both last states, the residual, and what the backward of each pass needs).
    """
    x = Launch.of(k, u, cu_seqlens, chunk_size)
    o, last, fit_last, residual = torch.empty_like(u), _last(x, u), _last(x, u), torch.empty_like(u)
    kept, fit_kept = _kept(x, k, e, d, True, keep), _kept(x, k, fit_e, None, False, keep)
    _forward(
        x, (r, k, u, g, e, beta, read, d), state, o, last, kept, scale, late,
        residual=residual, target=target, loss=loss, clip=clip,
    )  # fmt: skip
    fit = (r if fit_r is None else fit_r, k, residual, g if fit_g is None else fit_g, fit_e, strength, fit_read, None)
    _forward(x, fit, fit_state, o, fit_last, fit_kept, scale, late, base=o)
    return o, last, fit_last, residual, *kept, *fit_kept


def _last(x: Launch, u: Tensor) -> Tensor:
    return u.new_empty(x.batch // x.parts, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)


def _kept(x: Launch, k: Tensor, e: Tensor | None, d: Tensor | None, fit: bool, keep: bool) -> Kept:
    # A wide state, or products in fp32, leave no registers to make P and that of k in.
    busy = e is not None or d is not None or (fit and (x.key_dim > 128 or x.precision == "ieee"))
    erased = x.key_dim if e is not None else 1
    square, state = (x.all_chunks, x.heads, x.size, x.size), (x.heads, x.value_dim, x.key_dim)
    return (
        k.new_empty(x.all_chunks, x.heads, scalar.ROWS.value, x.size, dtype=x.vectors),
        absent(k) if e is None else k.new_empty(square),
        k.new_empty(square) if busy else absent(k),
        k.new_empty(square) if fit and busy else absent(k),
        k.new_empty(x.batch, x.segments, *state, dtype=torch.float32) if keep else absent(k),
        absent(k) if x.parts == 1 else k.new_empty(x.batch, x.heads, erased, erased, dtype=torch.float32),
    )


def _or_none(x: Tensor) -> Tensor | None:
    return x if x.numel() else None


def _forward(
    x: Launch,
    given: Given,
    state: Tensor | None,
    o: Tensor,
    last: Tensor,
    kept: Kept,
    scale: float,
    late: bool,
    *,
    base: Tensor | None = None,
    residual: Tensor | None = None,
    target: Tensor | None = None,
    loss: str | None = None,
    clip: float = 1.0,
) -> None:
    """One pass: fills o, on top of base, the last state, the residual where there is a loss, and what is kept."""
    r, k, u, g, e, beta, read, d = given
    vectors, inverse, within, overlaps, begin, maps = kept
    bounds, of, first = x.packed or (None, None, None)
    scalar.prepare[(x.all_chunks * x.heads,)](
        x.keys(r), x.keys(k), g, e, beta, read, d, vectors, x.squares(inverse), x.squares(within), x.squares(overlaps),
        bounds, of, first, x.tokens, x.chunks, x.batch, scale, **x.sizes(), LATE=late, FIT=loss is not None, SUM=x.sum,
        **x.how("prepare"),
    )  # fmt: skip
    ends = last
    if x.parts > 1:
        state, ends = _starts(x, k, u, vectors, inverse, state, maps), last.new_empty(x.batch, *last.shape[1:])
    scalar.scan[x.grid](
        x.keys(r), x.keys(k), x.values(u), vectors, x.squares(inverse), x.squares(within), x.squares(overlaps),
        x.values(target), x.values(base), state, _or_none(begin),
        x.values(o, store=True), x.values(residual, store=True), ends, None, None,
        **x.sequence(), from_chunk=0, to_chunk=x.chunks, every=x.every, segments=x.segments,
        clip=clip, V=x.value_dim, BV=x.bv, CORRECTED=d is not None, LOSS=loss, MAPS=False,
        **x.sizes(), **x.how("scan"),
    )  # fmt: skip
    if x.parts > 1:
        last.copy_(parts.each(ends, x.parts)[-1])


def _starts(
    x: Launch, k: Tensor, u: Tensor, vectors: Tensor, inverse: Tensor, state: Tensor | None, maps: Tensor
) -> Tensor:
    """The state that each part starts with; fills maps."""
    erases = maps.shape[-1] > 1
    x = replace(x, bv=min(x.bv, x.key_dim))
    found = maps.new_empty(x.batch, x.heads, x.key_dim, x.value_dim + (x.key_dim if erases else 0))
    scalar.scan[(found.shape[-1] // x.bv, x.heads, x.batch)](
        None, x.keys(k), x.values(u), vectors, x.squares(inverse), None, None, None, None, None, None,
        None, None, found, None, None,
        **x.sequence(), from_chunk=0, to_chunk=x.chunks, every=x.chunks, segments=1,
        clip=1.0, V=x.value_dim, BV=x.bv, CORRECTED=False, LOSS=None, MAPS=erases, **x.sizes(), **x.how("states"),
    )  # fmt: skip
    if erases:
        maps.copy_(found[..., x.value_dim :])
    else:
        decays = vectors[:, :, scalar.KEEPS.value, 0].unflatten(0, (x.batch, x.chunks))
        maps.copy_(decays.prod(1)[..., None, None])
    added = parts.each(found[..., : x.value_dim], x.parts)
    return torch.stack(parts.chained(state, parts.each(maps, x.parts), added), 1).flatten(0, 1)


def _backward(
    x: Launch,
    given: Given,
    grads: Given,
    kept: Kept,
    d_o: Tensor,
    d_last: Tensor | None,
    started: bool,
    scale: float,
    late: bool,
    *,
    d_error: Tensor | None = None,
    own: bool = False,
    more: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    loss: str | None = None,
    clip: float = 1.0,
) -> Tensor:
    """Of one pass: fills grads, and returns the gradient of the state, where it `started` from one.

    d_error: of target - S_{t-1}^T k; with `own`, the target is u.
    more: those of the gradients of r, k and g that hold something already, to which theirs is added.
    loss: u is a pseudo-residual of it, and its gradient that of the error.
    """
    r, k, u, g, e, beta, read, d = given
    d_r, d_k, d_u, d_g, d_e, d_beta, d_read, d_d = grads
    vectors, inverse, within, overlaps, begin, maps = kept
    assert k is not None
    assert u is not None
    spans = x.all_chunks if x.packed else x.batch * x.every
    states = k.new_empty(spans, x.heads, x.value_dim, x.key_dim)
    states_after = torch.empty_like(states)
    written = None
    if e is not None:
        written = torch.empty_like(u) if x.packed else u.new_empty(x.batch, x.every * x.size, x.heads, x.value_dim)
    solve, pairs, overlap = x.squares(inverse), x.squares(within), x.squares(overlaps)
    keys, values = x.keys(k), x.values(u)
    wide = x.per_chunk()
    # What is loaded ahead must fit beside states that are stored.
    back = x if d_error is None else replace(x, bv=min(x.bv, 64))
    more_r, more_k, more_g = more
    per_chunk = (
        wide.keys(r), wide.keys(k), wide.values(u), g, e, beta, read, d, wide.values(written), wide.states(states),
        wide.states(states_after), wide.values(d_o), wide.values(d_u), wide.values(d_error),
        wide.keys(more_r), wide.keys(more_k), more_g, wide.keys(d_r, store=True), wide.keys(d_k, store=True),
        wide.values(d_u, store=True), d_g, d_e, d_beta, d_read, d_d,
    )  # fmt: skip
    upstream, wrong, states, states_after = (
        back.values(d_o), back.values(d_error), x.states(states), back.states(states_after)
    )  # fmt: skip
    size = {**x.sizes(), "V": x.value_dim}

    def reverse(after: Tensor, states_after: Any, d_u: Tensor | None, at: dict[str, Any]) -> None:
        scalar.reverse[back.grid](
            x.keys(r), keys, vectors, solve, pairs, overlap, upstream, wrong, after, states_after,
            back.values(d_u, store=True), **at, **size, BV=back.bv, CORRECTED=d is not None, **back.how("reverse"),
        )  # fmt: skip

    after = begin.new_zeros(x.batch, x.heads, x.value_dim, x.key_dim)
    if x.parts > 1:
        reverse(after, None, None, {**x.sequence(), "from_chunk": 0, "to_chunk": x.chunks})
        back_to_front = (parts.each(one.mT, x.parts)[::-1] for one in (maps, after))
        d_ends = parts.chained(None if d_last is None else d_last.float(), *back_to_front)
        after = torch.stack(d_ends[::-1], 1).flatten(0, 1).mT.contiguous()
    elif d_last is not None:
        after = d_last.float().mT.contiguous()
    for segment in reversed(range(x.segments)):
        begins, ends = segment * x.every, min((segment + 1) * x.every, x.chunks)
        at = {**x.sequence(), "from_chunk": begins, "to_chunk": ends}
        scalar.scan[x.grid](
            None, keys, values, vectors, solve, None, None, None, None, None, begin,
            None, None, None, states, x.values(written, store=True),
            **at, **size, BV=x.bv, every=x.every, segments=x.segments, clip=clip, CORRECTED=False, LOSS=None,
            MAPS=False, **x.how("states"),
        )  # fmt: skip
        reverse(after, states_after, d_u, at)
        gradients[((x.chunks if x.packed else x.batch * (ends - begins)) * x.heads,)](
            *per_chunk, **x.sequence(), of=x.packed and x.packed[1], sequences=x.batch, from_chunk=begins,
            span=ends - begins, scale=scale, clip=clip, V=x.value_dim, BV=wide.bv, BK=wide.bk, LATE=late,
            FIT=d_error is not None, OWN=own, LOSS=loss, SUM=x.sum, **x.sizes(), **wide.how("gradients", e is not None),
        )  # fmt: skip
    return parts.each(after, x.parts)[0].mT.contiguous() if started else absent(u)


@torch.library.custom_op("deltalab::scalar_scan_backward", mutates_args=())
def _scalar_backward(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    cu_seqlens: Tensor | None,
    vectors: Tensor,
    inverse: Tensor,
    within: Tensor,
    overlaps: Tensor,
    begin: Tensor,
    maps: Tensor,
    d_o: Tensor,
    d_last: Tensor | None,
    started: bool,
    scale: float,
    late: bool,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r, k, u, g, e, beta, read, d and the state; empty for what was not given."""
    x = Launch.of(k, u, cu_seqlens, chunk_size)
    given = (r, k, u, g, e, beta, read, d)
    grads = _like(given, u)
    kept = (vectors, inverse, within, overlaps, begin, maps)
    d_state = _backward(x, given, tuple(map(_or_none, grads)), kept, d_o, d_last, started, scale, late)
    return [*grads, d_state]


@torch.library.custom_op("deltalab::residual_scan_backward", mutates_args=())
def _residual_backward(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    target: Tensor | None,
    fit_r: Tensor | None,
    fit_g: Tensor | None,
    fit_e: Tensor | None,
    strength: Tensor,
    fit_read: Tensor | None,
    cu_seqlens: Tensor | None,
    residual: Tensor,
    vectors: Tensor,
    inverse: Tensor,
    within: Tensor,
    overlaps: Tensor,
    begin: Tensor,
    maps: Tensor,
    fit_vectors: Tensor,
    fit_inverse: Tensor,
    fit_within: Tensor,
    fit_overlaps: Tensor,
    fit_begin: Tensor,
    fit_maps: Tensor,
    d_o: Tensor,
    d_last: Tensor | None,
    d_fit_last: Tensor | None,
    started: bool,
    fit_started: bool,
    scale: float,
    late: bool,
    loss: str,
    clip: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r to fit_read and of both states; empty for what was not given."""
    x = Launch.of(k, u, cu_seqlens, chunk_size)
    grads = _like((r, k, u, g, e, beta, read, d, target, fit_r, fit_g, fit_e, strength, fit_read), u)
    first, (d_target, d_fit_r, d_fit_g, *rest) = [_or_none(one) for one in grads[:8]], map(_or_none, grads[8:])
    d_r, d_k, _, d_g, *_ = first
    # The second pass goes back first; the other one adds to what that leaves where they have an operand in common.
    d_error = torch.empty_like(u) if d_target is None else d_target
    fit = (r if fit_r is None else fit_r, k, residual, g if fit_g is None else fit_g, fit_e, strength, fit_read, None)
    d_fit = (d_r if fit_r is None else d_fit_r, d_k, d_error, d_g if fit_g is None else d_fit_g, *rest, None)
    fit_kept = (fit_vectors, fit_inverse, fit_within, fit_overlaps, fit_begin, fit_maps)
    d_fit_state = _backward(x, fit, d_fit, fit_kept, d_o, d_fit_last, fit_started, scale, late, loss=loss, clip=clip)
    more = (d_r if fit_r is None else None, d_k, d_g if fit_g is None else None)
    d_state = _backward(
        x, (r, k, u, g, e, beta, read, d), tuple(first), (vectors, inverse, within, overlaps, begin, maps), d_o,
        d_last, started, scale, late, d_error=d_error, own=target is None, more=more,
    )  # fmt: skip
    return [*grads, d_state, d_fit_state]


def _like(given: Given, u: Tensor) -> list[Tensor]:
    return [absent(u) if one is None else torch.empty_like(one) for one in given]


@scalar_scan.register_fake
def _(r, k, u, g, e, beta, read, d, state, cu_seqlens, scale, late, chunk_size, keep):  # type: ignore[no-untyped-def]
    x = Launch.of(k, u, cu_seqlens, chunk_size)
    return torch.empty_like(u), _last(x, u), *_kept(x, k, e, d, False, keep)


@residual_scan.register_fake
def _(
    r, k, u, g, e, beta, read, d, target, fit_r, fit_g, fit_e, strength, fit_read, state, fit_state, cu_seqlens,
    scale, late, loss, clip, chunk_size, keep,
):  # type: ignore[no-untyped-def]  # fmt: skip
    x = Launch.of(k, u, cu_seqlens, chunk_size)
    kept, fit_kept = _kept(x, k, e, d, True, keep), _kept(x, k, fit_e, None, False, keep)
    return torch.empty_like(u), _last(x, u), _last(x, u), torch.empty_like(u), *kept, *fit_kept


@_scalar_backward.register_fake
def _(r, k, u, g, e, beta, read, d, cu_seqlens, *kept_and_rest):  # type: ignore[no-untyped-def]
    x = Launch.of(k, u, cu_seqlens, kept_and_rest[-1])
    started = kept_and_rest[-4]
    return [*_like((r, k, u, g, e, beta, read, d), u), _last(x, u) if started else absent(u)]


@_residual_backward.register_fake
def _(
    r, k, u, g, e, beta, read, d, target, fit_r, fit_g, fit_e, strength, fit_read, cu_seqlens, *kept_and_rest
):  # type: ignore[no-untyped-def]  # fmt: skip
    x = Launch.of(k, u, cu_seqlens, kept_and_rest[-1])
    given = (r, k, u, g, e, beta, read, d, target, fit_r, fit_g, fit_e, strength, fit_read)
    starts = (_last(x, u) if started else absent(u) for started in kept_and_rest[-7:-5])
    return [*_like(given, u), *starts]


def _register(op: Any, backward: Any, tensors: int, states: int) -> None:
    """The gradient of an operator that takes so many tensors, cu_seqlens the last and before it so many states."""

    def remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *given, cu_seqlens = inputs[:tensors]
        ctx.save_for_backward(*given[:-states], cu_seqlens, *output[1 + states :])
        ctx.rest = inputs[tensors:-1]
        ctx.given = [one is not None for one in given]
        ctx.set_materialize_grads(False)

    def differentiate(ctx: Any, d_o: Tensor | None, *d_rest: Tensor | None) -> Any:
        d_o = torch.zeros_like(ctx.saved_tensors[2]) if d_o is None else d_o.contiguous()
        found = backward(*ctx.saved_tensors, d_o, *d_rest[:states], *ctx.given[-states:], *ctx.rest)
        grads = [one if given else None for one, given in zip(found, ctx.given, strict=True)]
        return (*grads, None, *[None] * len(ctx.rest), None)

    op.register_autograd(differentiate, setup_context=remember)
    fold_into_batch(op)
    fold_into_batch(backward)


_register(scalar_scan, _scalar_backward, 10, 1)
_register(residual_scan, _residual_backward, 17, 2)
