"""`kernels.scalar` as PyTorch operators: launches, gradients, `torch.func.vmap` and `torch.compile`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltalab.kernels import sequence_parts
from deltalab.kernels.register import absent, empty_like, existing, register
from deltalab.kernels.scalar import forward
from deltalab.kernels.scalar.backward import gradients
from deltalab.kernels.scalar.launch import ScalarLaunch


class ScalarOperands(NamedTuple):
    """The operands of one pass as `rule.Operands` names them, or their gradients."""

    r: Tensor
    k: Tensor
    u: Tensor
    g: Tensor | None
    e: Tensor | None
    beta: Tensor | None
    read: Tensor | None
    d: Tensor | None


class Second(NamedTuple):
    """What `rule.Fit` gives a second pass, or the gradients. target, r, g: None for the first pass's u, r and g."""

    target: Tensor | None
    r: Tensor | None
    g: Tensor | None
    e: Tensor | None
    strength: Tensor
    read: Tensor | None

    def after(self, first: ScalarOperands, u: Tensor) -> ScalarOperands:
        """All operands of the second pass, which writes u."""
        r, g = first.r if self.r is None else self.r, first.g if self.g is None else self.g
        return ScalarOperands(r=r, k=first.k, u=u, g=g, e=self.e, beta=self.strength, read=self.read, d=None)


class Kept(NamedTuple):
    """What the forward of a pass leaves for its backward.

    vectors, inverse, within, overlaps: what `forward.prepare` writes. begin: the state before each segment.
    maps: the linear map that each part of a sequence applies to its first state.
    """

    vectors: Tensor
    inverse: Tensor
    within: Tensor
    overlaps: Tensor
    begin: Tensor
    maps: Tensor


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
    """Scans a state that decays by a scalar, as `rule.Operands` and `structure.Transition` define it.

    Contiguous r, k [B, T, H, K], u [B, T, H, V], scalars [B, T, H], state [B, H, K, V] (N of them where
    cu_seqlens [N + 1] packs N sequences into B = 1). K is a power of two and at least 16, V a multiple of 16.
    late: whether what is erased is read from the decayed state. keep: whether to return what the backward needs.
    Returns (o, last state, *Kept).
    """
    x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
    o, last, kept = torch.empty_like(u), _last(x, u), _kept(x, k, e, d, keep)
    _forward(x, ScalarOperands(r, k, u, g, e, beta, read, d), state, o, last, kept, scale, late)
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
    """`scalar_scan` that reads S_{t-1}, plus what it reads from a second state, as `rule.Fit` defines it.

    target, fit_r, fit_g: None for u, r and g, whose gradients are then sums over both passes.
    Returns (o, last state, second last state, residual, *Kept of the first pass, *Kept of the second).
    """
    x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
    o, last, fit_last, residual = torch.empty_like(u), _last(x, u), _last(x, u), torch.empty_like(u)
    kept, fit_kept = _kept(x, k, e, d, keep, fit=True), _kept(x, k, fit_e, None, keep)
    first = ScalarOperands(r, k, u, g, e, beta, read, d)
    _forward(
        x, first, state, o, last, kept, scale, late, residual=residual, target=target, loss=loss, clip=clip
    )  # fmt: skip
    second = Second(target, fit_r, fit_g, fit_e, strength, fit_read).after(first, residual)
    _forward(x, second, fit_state, o, fit_last, fit_kept, scale, late, base=o)
    return o, last, fit_last, residual, *kept, *fit_kept


def _last(x: ScalarLaunch, u: Tensor) -> Tensor:
    return u.new_empty(x.batch // x.parts, x.heads, x.key_dim, x.value_dim, dtype=torch.float32)


def _kept(
    x: ScalarLaunch, k: Tensor, e: Tensor | None, d: Tensor | None, keep: bool, *, fit: bool = False
) -> Kept:  # fmt: skip
    # A wide state, or products in fp32, leave `scan` no registers to make P and k's own P in.
    busy = e is not None or d is not None or (fit and (x.key_dim > 128 or x.wide))
    erased = x.key_dim if e is not None else 1
    at, state = (x.slots(x.chunks), x.heads), (x.heads, x.value_dim, x.key_dim)
    square = (*at, x.size, x.size)
    return Kept(
        vectors=k.new_empty(*at, forward.ROWS.value, x.size, dtype=x.vectors),
        inverse=absent(k) if e is None else k.new_empty(square),
        within=k.new_empty(square) if busy else absent(k),
        overlaps=k.new_empty(square) if fit and busy else absent(k),
        begin=k.new_empty(x.batch, x.segments, *state, dtype=torch.float32) if keep else absent(k),
        maps=absent(k) if x.parts == 1 else k.new_empty(x.batch, x.heads, erased, erased, dtype=torch.float32),
    )


def _forward(
    x: ScalarLaunch,
    given: ScalarOperands,
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
    """Runs one pass: fills o (its output plus `base`), the last state, with a loss the residual, and `kept`."""
    everywhere, r, k = range(x.chunks), x.keys(given.r), x.keys(given.k)
    inverse, within, overlaps = x.squares(kept.inverse), x.squares(kept.within), x.squares(kept.overlaps)
    x.launch(
        forward.prepare, (x.slots(x.chunks) * x.heads,), everywhere,
        r=r, k=k, g=given.g, e=given.e, beta=given.beta, read=given.read, d=given.d,
        vectors=kept.vectors, inverse=inverse, within=within, overlaps=overlaps,
        scale=scale, LATE=late, FIT=loss is not None,
    )  # fmt: skip
    ends = last
    if x.parts > 1:
        state, ends = _starts(x, given, kept, state), last.new_empty(x.batch, *last.shape[1:])
    x.launch(
        forward.scan, x.grid, everywhere,
        r=r, k=k, u=x.values(given.u), vectors=kept.vectors, inverse=inverse, within=within, overlaps=overlaps,
        target=x.values(target), base=x.values(base), state=state, begin_states=existing(kept.begin),
        o=x.values(o, store=True), residual=x.values(residual, store=True), last=ends, states=None, written=None,
        clip=clip, CORRECTED=given.d is not None, LOSS=loss, MAPS=False,
    )  # fmt: skip
    if x.parts > 1:
        last.copy_(sequence_parts.each(ends, x.parts)[-1])


def _starts(x: ScalarLaunch, given: ScalarOperands, kept: Kept, state: Tensor | None) -> Tensor:
    """The state that each part starts with; fills kept.maps."""
    maps, erases = kept.maps, given.e is not None
    x = x.narrowed(x.key_dim)
    found = maps.new_empty(x.batch, x.heads, x.key_dim, x.value_dim + (x.key_dim if erases else 0))
    x.launch(
        forward.scan, (found.shape[-1] // x.bv, x.heads, x.batch), range(x.chunks),
        r=None, k=x.keys(given.k), u=x.values(given.u), vectors=kept.vectors, inverse=x.squares(kept.inverse),
        within=None, overlaps=None, target=None, base=None, state=None, begin_states=None,
        o=None, residual=None, last=found, states=None, written=None,
        every=x.chunks, segments=1, clip=1.0, CORRECTED=False, LOSS=None, MAPS=erases,
    )  # fmt: skip
    if erases:
        maps.copy_(found[..., x.value_dim :])
    else:
        decays = kept.vectors[:, :, forward.KEEPS.value, 0].unflatten(0, (x.batch, x.chunks))
        maps.copy_(decays.prod(1)[..., None, None])
    added = sequence_parts.each(found[..., : x.value_dim], x.parts)
    return torch.stack(sequence_parts.chained(state, sequence_parts.each(maps, x.parts), added), 1).flatten(0, 1)


def _backward(
    x: ScalarLaunch,
    given: ScalarOperands,
    grads: ScalarOperands,
    kept: Kept,
    d_o: Tensor,
    d_last: Tensor | None,
    has_state: bool,
    scale: float,
    late: bool,
    *,
    d_error: Tensor | None = None,
    own: bool = False,
    more_r: Tensor | None = None,
    more_k: Tensor | None = None,
    more_g: Tensor | None = None,
    loss: str | None = None,
    clip: float = 1.0,
) -> Tensor:
    """Runs one pass backward: fills grads, and returns the gradient of the first state, `absent` without has_state.

    d_error: gradient of target - S_{t-1}^T k. own: whether the target is u.
    more_r, more_k, more_g: gradients that those of r, k and g are added to.
    loss: u is the pseudo-residual of this loss, and grads.u becomes the gradient of its error.
    """
    r, k, u = x.keys(given.r), x.keys(given.k), x.values(given.u)
    inverse, within, overlaps = x.squares(kept.inverse), x.squares(kept.within), x.squares(kept.overlaps)
    states = given.k.new_empty(x.slots(x.every), x.heads, x.value_dim, x.key_dim)
    states_after = torch.empty_like(states)
    written = None
    if given.e is not None:
        shape = given.u.shape if x.packing else (x.batch, x.every * x.size, x.heads, x.value_dim)
        written = given.u.new_empty(shape)
    wide = x.per_chunk(erases=given.e is not None)
    # A narrower block: with d_error, what is loaded ahead must fit beside the states that are stored.
    back = x if d_error is None else x.narrowed(64)
    per_chunk = {
        "r": wide.keys(given.r), "k": wide.keys(given.k), "u": wide.values(given.u),
        "g": given.g, "e": given.e, "beta": given.beta, "read": given.read, "d": given.d,
        "written": wide.values(written), "states": wide.states(states), "states_after": wide.states(states_after),
        "d_o": wide.values(d_o), "d_u": wide.values(grads.u), "d_error": wide.values(d_error),
        "more_r": wide.keys(more_r), "more_k": wide.keys(more_k), "more_g": more_g,
        "d_r": wide.keys(grads.r, store=True), "d_k": wide.keys(grads.k, store=True),
        "new_d_u": wide.values(grads.u, store=True),
        "d_g": grads.g, "d_e": grads.e, "d_beta": grads.beta, "d_read": grads.read, "d_d": grads.d,
    }  # fmt: skip
    upstream, wrong = back.values(d_o), back.values(d_error)

    def reverse(chunks: range, d_state: Tensor, states_after: Tensor | None, d_u: Tensor | None) -> None:
        back.launch(
            forward.reverse, back.grid, chunks,
            r=r, k=k, vectors=kept.vectors, inverse=inverse, within=within, overlaps=overlaps,
            d_o=upstream, d_error=wrong, d_state=d_state,
            states_after=None if states_after is None else back.states(states_after),
            d_u=back.values(d_u, store=True), CORRECTED=given.d is not None,
        )  # fmt: skip

    d_state = kept.begin.new_zeros(x.batch, x.heads, x.value_dim, x.key_dim)
    if x.parts > 1:
        reverse(range(x.chunks), d_state, None, None)
        back_to_front = (sequence_parts.each(one.mT, x.parts)[::-1] for one in (kept.maps, d_state))
        d_ends = sequence_parts.chained(None if d_last is None else d_last.float(), *back_to_front)
        d_state = torch.stack(d_ends[::-1], 1).flatten(0, 1).mT.contiguous()
    elif d_last is not None:
        d_state = d_last.float().mT.contiguous()
    for number in reversed(range(x.segments)):
        chunks = x.segment(number)
        x.launch(
            forward.scan, x.grid, chunks,
            r=None, k=k, u=u, vectors=kept.vectors, inverse=inverse, within=None, overlaps=None,
            target=None, base=None, state=None, begin_states=kept.begin,
            o=None, residual=None, last=None, states=x.states(states), written=x.values(written, store=True),
            clip=clip, CORRECTED=False, LOSS=None, MAPS=False,
        )  # fmt: skip
        reverse(chunks, d_state, states_after, grads.u)
        wide.launch(
            gradients, (x.slots(len(chunks)) * x.heads,), chunks,
            **per_chunk, scale=scale, clip=clip, LATE=late, FIT=d_error is not None, OWN=own, LOSS=loss,
        )  # fmt: skip
    return sequence_parts.each(d_state, x.parts)[0].mT.contiguous() if has_state else absent(given.u)


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
    d_o: Tensor | None,
    d_last: Tensor | None,
    has_state: bool,
    scale: float,
    late: bool,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r, k, u, g, e, beta, read, d and the state; `absent` for what was not given."""
    x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
    given, kept = ScalarOperands(r, k, u, g, e, beta, read, d), Kept(vectors, inverse, within, overlaps, begin, maps)
    grads = empty_like(given, u)
    d_o = torch.zeros_like(u) if d_o is None else d_o.contiguous()
    d_state = _backward(x, given, ScalarOperands._make(map(existing, grads)), kept, d_o, d_last, has_state, scale, late)
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
    d_o: Tensor | None,
    d_last: Tensor | None,
    d_fit_last: Tensor | None,
    has_state: bool,
    has_fit_state: bool,
    scale: float,
    late: bool,
    loss: str,
    clip: float,
    chunk_size: int,
) -> list[Tensor]:
    """Gradients of r to fit_read and of both states; `absent` for what was not given."""
    x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
    first, second = (
        ScalarOperands(r, k, u, g, e, beta, read, d),
        Second(target, fit_r, fit_g, fit_e, strength, fit_read),
    )
    kept = Kept(vectors, inverse, within, overlaps, begin, maps)
    fit_kept = Kept(fit_vectors, fit_inverse, fit_within, fit_overlaps, fit_begin, fit_maps)
    grads, fit_grads = empty_like(first, u), empty_like(second, u)
    d_first, d_second = ScalarOperands._make(map(existing, grads)), Second._make(map(existing, fit_grads))
    d_o = torch.zeros_like(u) if d_o is None else d_o.contiguous()
    # The second pass goes back first. The first pass then adds to the gradients of operands that both have.
    d_error = torch.empty_like(u) if d_second.target is None else d_second.target
    d_fit_state = _backward(
        x, second.after(first, residual), d_second.after(d_first, d_error), fit_kept, d_o, d_fit_last, has_fit_state,
        scale, late, loss=loss, clip=clip,
    )  # fmt: skip
    d_state = _backward(
        x, first, d_first, kept, d_o, d_last, has_state, scale, late, d_error=d_error, own=target is None,
        more_r=d_first.r if fit_r is None else None, more_k=d_first.k, more_g=d_first.g if fit_g is None else None,
    )  # fmt: skip
    return [*grads, *fit_grads, d_state, d_fit_state]


def _scalar_shapes(
    *, k: Tensor, u: Tensor, e: Tensor | None, d: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int, keep: bool,
    **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
    return torch.empty_like(u), _last(x, u), *_kept(x, k, e, d, keep)


def _residual_shapes(
    *, k: Tensor, u: Tensor, e: Tensor | None, d: Tensor | None, fit_e: Tensor | None, cu_seqlens: Tensor | None,
    chunk_size: int, keep: bool, **_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
    kept, fit_kept = _kept(x, k, e, d, keep, fit=True), _kept(x, k, fit_e, None, keep)
    return torch.empty_like(u), _last(x, u), _last(x, u), torch.empty_like(u), *kept, *fit_kept


def _gradient_shapes(operands: Sequence[str], states: Sequence[str]) -> Callable[..., list[Tensor]]:
    def shapes(*, k: Tensor, u: Tensor, cu_seqlens: Tensor | None, chunk_size: int, **given: Any) -> list[Tensor]:
        x = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
        given.update(k=k, u=u)
        grads = empty_like((given[name] for name in operands), u)
        return [*grads, *(_last(x, u) if given[f"has_{name}"] else absent(u) for name in states)]

    return shapes


FIRST = list(ScalarOperands._fields)
SECOND = ["target", "fit_r", "fit_g", "fit_e", "strength", "fit_read"]
FIT_KEPT = [f"fit_{name}" for name in Kept._fields]

register(_scalar_backward, shapes=_gradient_shapes(FIRST, ["state"]))
register(
    scalar_scan, shapes=_scalar_shapes, backward=_scalar_backward, outputs=["o", "last", *Kept._fields], results=2
)  # fmt: skip
register(_residual_backward, shapes=_gradient_shapes(FIRST + SECOND, ["state", "fit_state"]))
register(
    residual_scan, shapes=_residual_shapes, backward=_residual_backward,
    outputs=["o", "last", "fit_last", "residual", *Kept._fields, *FIT_KEPT], results=3,
)  # fmt: skip
