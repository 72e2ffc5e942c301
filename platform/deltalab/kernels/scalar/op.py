"""`kernels.scalar` as PyTorch operators: launches, gradients, `torch.func.vmap` and `torch.compile`.

Each operator takes its arguments in the order of its schema, which follows from the tuples of `kernels.operands`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltalab.kernels import sequence_parts
from deltalab.kernels.operands import FIT, SCALAR, FitOperands, Layout, ScalarOperands
from deltalab.kernels.register import absent, empty_like, existing, register
from deltalab.kernels.scalar import forward
from deltalab.kernels.scalar.backward import gradients
from deltalab.kernels.scalar.launch import ScalarLaunch


class Kept(NamedTuple):
    """What the forward of a pass leaves for its backward.

    Attributes:
        vectors: The factors of each token that `forward.prepare` writes.
        inverse: (I + M)^{-1} - I of each chunk.
        within: P of each chunk.
        overlaps: P of each chunk with k in place of r.
        begin: The state before each segment.
        maps: The linear map that each part of a sequence applies to its first state.
    """

    vectors: Tensor
    inverse: Tensor
    within: Tensor
    overlaps: Tensor
    begin: Tensor
    maps: Tensor


KEPT = Layout(Kept)


def _tensors(number: int) -> str:
    """The type of an operator that returns so many tensors."""
    return f"({', '.join(['Tensor'] * number)})"


@torch.library.custom_op(
    "deltalab::scalar_scan",
    mutates_args=(),
    schema=f"({SCALAR.schema()}, Tensor? state, Tensor? cu_seqlens, float scale, bool late, bool early,"
    f" SymInt chunk_size, bool keep) -> {_tensors(2 + len(Kept._fields))}",
)
def scalar_scan(*arguments: Any) -> tuple[Tensor, ...]:
    """Scans a state that decays by a scalar, as `rule.Operands` and `structure.Transition` define it.

    Args:
        *arguments: `ScalarOperands`, contiguous, where K is a power of two and at least 16, and V a multiple of 16.
                r and k are in u's dtype, or in fp32 if their gradients shall be (`rule.Operands.exact_gradients`).
            state: The first state [B, H, K, V], or None for zero; N states if sequences are packed.
            cu_seqlens: The bounds [N + 1] of N sequences that are packed into B = 1, or None.
            scale: The factor of the output.
            late: Whether what is erased is read from the decayed state.
            early: Whether a token reads the state before it writes.
            chunk_size: Tokens of a chunk.
            keep: Whether to return what the backward needs.

    Returns:
        o, the last state, and the fields of `Kept`.
    """
    operands, (state, cu_seqlens, scale, late, early, chunk_size, keep) = SCALAR.split(arguments)
    operands = SCALAR.narrowed(operands)
    plan = ScalarLaunch.of(operands.k, operands.u, cu_seqlens, chunk_size)
    o, last, kept = torch.empty_like(operands.u), _last(plan, operands.u), _kept(plan, operands, keep)
    _forward(plan, operands, state, o, last, kept, scale, late, early)
    return o, last, *kept


@torch.library.custom_op(
    "deltalab::residual_scan",
    mutates_args=(),
    schema=f"({SCALAR.schema()}, {FIT.schema('fit_')}, Tensor? state, Tensor? fit_state, Tensor? cu_seqlens,"
    f" float scale, bool late, str loss, float clip, SymInt chunk_size, bool keep)"
    f" -> {_tensors(4 + 2 * len(Kept._fields))}",
)
def residual_scan(*arguments: Any) -> tuple[Tensor, ...]:
    """Computes a `scalar_scan` that reads S_{t-1}, and adds the reads of a second state, as `rule.Fit` defines them.

    Args:
        *arguments: `ScalarOperands`, `FitOperands`, and the other arguments of `scalar_scan`, with the second state
            after the first one, and with the loss and the clip of the pseudo-residual before the chunk size. Where a
            fit's target, r or g is None, the gradients of u, r and g are sums over both passes.

    Returns:
        o, both last states, the pseudo-residual, and the fields of `Kept` for the first pass and for the second.
    """
    first, more = SCALAR.split(arguments)
    fit, more = FIT.split(more)
    state, fit_state, cu_seqlens, scale, late, loss, clip, chunk_size, keep = more
    plan, u = ScalarLaunch.of(first.k, first.u, cu_seqlens, chunk_size), first.u
    o, last, fit_last, residual = torch.empty_like(u), _last(plan, u), _last(plan, u), torch.empty_like(u)
    second = fit.after(first, residual)
    kept, fit_kept = _kept(plan, first, keep, predicts=True), _kept(plan, second, keep)
    _forward(
        plan, first, state, o, last, kept, scale, late, True, residual=residual, target=fit.target, loss=loss, clip=clip
    )  # fmt: skip
    _forward(plan, second, fit_state, o, fit_last, fit_kept, scale, late, False, base=o)
    return o, last, fit_last, residual, *kept, *fit_kept


def _last(plan: ScalarLaunch, u: Tensor) -> Tensor:
    """Room for the last state of each sequence."""
    return u.new_empty(plan.batch // plan.parts, plan.heads, plan.key_dim, plan.value_dim, dtype=torch.float32)


def _kept(plan: ScalarLaunch, operands: ScalarOperands, keep: bool, *, predicts: bool = False) -> Kept:
    """Allocates what a pass leaves for its backward. `predicts` says whether the pass predicts a target."""
    k, e, d = operands.k, operands.e, operands.d
    # With a wide state or products in fp32, `scan` has no registers to compute P, and P with k in place of r.
    busy = e is not None or d is not None or (predicts and (plan.key_dim > 128 or plan.fp32))
    erased = plan.key_dim if e is not None else 1
    slots, state = (plan.slots(plan.chunks), plan.heads), (plan.heads, plan.value_dim, plan.key_dim)
    square = (*slots, plan.chunk_size, plan.chunk_size)
    one_part = plan.parts == 1
    return Kept(
        vectors=k.new_empty(*slots, forward.ROWS.value, plan.chunk_size, dtype=plan.vector_dtype),
        inverse=absent(k) if e is None else k.new_empty(square),
        within=k.new_empty(square) if busy else absent(k),
        overlaps=k.new_empty(square) if predicts and busy else absent(k),
        begin=k.new_empty(plan.batch, plan.segments, *state, dtype=torch.float32) if keep else absent(k),
        maps=absent(k) if one_part else k.new_empty(plan.batch, plan.heads, erased, erased, dtype=torch.float32),
    )


def _forward(
    plan: ScalarLaunch,
    operands: ScalarOperands,
    state: Tensor | None,
    o: Tensor,
    last: Tensor,
    kept: Kept,
    scale: float,
    late: bool,
    early: bool,
    *,
    base: Tensor | None = None,
    residual: Tensor | None = None,
    target: Tensor | None = None,
    loss: str | None = None,
    clip: float = 1.0,
) -> None:
    """Runs one pass. Fills o (its output plus `base`), `last` and `kept`, and with a loss also `residual`."""
    everywhere, arguments = range(plan.chunks), SCALAR.arguments(operands, plan.keys)
    r, k, u = arguments["r"], arguments["k"], plan.values(operands.u)
    inverse, within, overlaps = plan.squares(kept.inverse), plan.squares(kept.within), plan.squares(kept.overlaps)
    plan.launch(
        forward.prepare, (plan.slots(plan.chunks) * plan.heads,), everywhere, arguments,
        vectors=kept.vectors, inverse=inverse, within=within, overlaps=overlaps,
        scale=scale, LATE=late, EARLY=early, PREDICTS=loss is not None,
    )  # fmt: skip
    ends = last
    if plan.parts > 1:
        state, ends = _starts(plan, operands, kept, state), last.new_empty(plan.batch, *last.shape[1:])
    plan.launch(
        forward.scan, plan.grid, everywhere,
        r=r, k=k, u=u, vectors=kept.vectors, inverse=inverse, within=within, overlaps=overlaps,
        target=plan.values(target), base=plan.values(base), state=state, begin_states=existing(kept.begin),
        o=plan.values(o, store=True), residual=plan.values(residual, store=True), last=ends, states=None, written=None,
        clip=clip, CORRECTED=operands.d is not None, EARLY=early, LOSS=loss, MAPS=False,
    )  # fmt: skip
    if plan.parts > 1:
        last.copy_(sequence_parts.split(ends, plan.parts)[-1])


def _starts(plan: ScalarLaunch, operands: ScalarOperands, kept: Kept, state: Tensor | None) -> Tensor:
    """Returns the state that each part of a sequence starts with, and writes `kept.maps`."""
    maps, erases = kept.maps, operands.e is not None
    plan = plan.narrowed(plan.key_dim)
    ends = maps.new_empty(plan.batch, plan.heads, plan.key_dim, plan.value_dim + (plan.key_dim if erases else 0))
    plan.launch(
        forward.scan, (ends.shape[-1] // plan.bv, plan.heads, plan.batch), range(plan.chunks),
        r=None, k=plan.keys(operands.k), u=plan.values(operands.u), vectors=kept.vectors,
        inverse=plan.squares(kept.inverse), within=None, overlaps=None, target=None, base=None, state=None,
        begin_states=None, o=None, residual=None, last=ends, states=None, written=None,
        segment_chunks=plan.chunks, segments=1, clip=1.0, CORRECTED=False, EARLY=False, LOSS=None, MAPS=erases,
    )  # fmt: skip
    if erases:
        maps.copy_(ends[..., plan.value_dim :])
    else:
        decays = kept.vectors[:, :, forward.KEEPS.value, 0].unflatten(0, (plan.batch, plan.chunks))
        maps.copy_(decays.prod(1)[..., None, None])
    written = sequence_parts.split(ends[..., : plan.value_dim], plan.parts)
    starts = sequence_parts.first_states(state, sequence_parts.split(maps, plan.parts), written)
    return torch.stack(starts, 1).flatten(0, 1)


def _backward(
    plan: ScalarLaunch,
    operands: ScalarOperands,
    grads: ScalarOperands,
    kept: Kept,
    d_o: Tensor,
    d_last: Tensor | None,
    has_state: bool,
    scale: float,
    late: bool,
    early: bool,
    *,
    d_error: Tensor | None = None,
    predicts_u: bool = False,
    more_r: Tensor | None = None,
    more_k: Tensor | None = None,
    more_g: Tensor | None = None,
    loss: str | None = None,
    clip: float = 1.0,
) -> Tensor:
    """Runs the backward of one pass and fills `grads`. Returns the gradient of the first state.

    If the pass has no first state (`has_state` is false), the returned tensor is `absent`.

    `d_error` is the gradient of the error, target - S_{t-1}^T k. `predicts_u` says whether the target is u. The
    gradients of r, k and g are added to `more_r`, `more_k` and `more_g`. With a loss, u is the pseudo-residual of an
    error, and `grads.u` gets the gradient of that error.
    """
    r, k, u = plan.keys(operands.r), plan.keys(operands.k), plan.values(operands.u)
    inverse, within, overlaps = plan.squares(kept.inverse), plan.squares(kept.within), plan.squares(kept.overlaps)
    states = operands.k.new_empty(plan.slots(plan.segment_chunks), plan.heads, plan.value_dim, plan.key_dim)
    states_after = torch.empty_like(states)
    written = None
    if operands.e is not None:
        shape = (plan.batch, plan.segment_chunks * plan.chunk_size, plan.heads, plan.value_dim)
        written = operands.u.new_empty(operands.u.shape if plan.packing else shape)
    chunk_plan = plan.per_chunk(erases=operands.e is not None)
    # With d_error, blocks are narrower, so that tiles loaded ahead fit beside the states that are stored.
    reverse_plan = plan if d_error is None else plan.narrowed(64)
    stored_keys, stored_values = partial(chunk_plan.keys, store=True), partial(chunk_plan.values, store=True)
    d_arguments = SCALAR.gradients(grads, stored_keys, stored_values)
    chunk_arguments = {
        **SCALAR.arguments(operands, chunk_plan.keys, chunk_plan.values), **d_arguments,
        # `gradients` loads the gradient of beta u and stores that of u in its place.
        "d_u": chunk_plan.values(grads.u), "new_d_u": d_arguments["d_u"],
        "written": chunk_plan.values(written), "states": chunk_plan.states(states),
        "states_after": chunk_plan.states(states_after),
        "d_o": chunk_plan.values(d_o), "d_error": chunk_plan.values(d_error),
        "more_r": chunk_plan.keys(more_r), "more_k": chunk_plan.keys(more_k), "more_g": more_g,
        "scale": scale, "clip": clip, "LATE": late, "EARLY": early, "LOSS": loss,
        "PREDICTS": d_error is not None, "PREDICTS_U": predicts_u,
    }  # fmt: skip
    d_o_tiles, d_error_tiles = reverse_plan.values(d_o), reverse_plan.values(d_error)

    def reverse(chunks: range, d_state: Tensor, states_after: Tensor | None, d_u: Tensor | None) -> None:
        reverse_plan.launch(
            forward.reverse, reverse_plan.grid, chunks,
            r=r, k=k, vectors=kept.vectors, inverse=inverse, within=within, overlaps=overlaps,
            d_o=d_o_tiles, d_error=d_error_tiles, d_state=d_state,
            states_after=None if states_after is None else reverse_plan.states(states_after),
            d_u=reverse_plan.values(d_u, store=True), CORRECTED=operands.d is not None, EARLY=early,
        )  # fmt: skip

    d_state = kept.begin.new_zeros(plan.batch, plan.heads, plan.value_dim, plan.key_dim)
    if plan.parts > 1:
        reverse(range(plan.chunks), d_state, None, None)
        last_to_first = (sequence_parts.split(x.mT, plan.parts)[::-1] for x in (kept.maps, d_state))
        d_ends = sequence_parts.first_states(None if d_last is None else d_last.float(), *last_to_first)
        d_state = torch.stack(d_ends[::-1], 1).flatten(0, 1).mT.contiguous()
    elif d_last is not None:
        d_state = d_last.float().mT.contiguous()
    for number in reversed(range(plan.segments)):
        chunks = plan.segment(number)
        plan.storing_states(operands.e is not None).launch(
            forward.scan, plan.grid, chunks,
            r=None, k=k, u=u, vectors=kept.vectors, inverse=inverse, within=None, overlaps=None,
            target=None, base=None, state=None, begin_states=kept.begin,
            o=None, residual=None, last=None, states=plan.states(states), written=plan.values(written, store=True),
            clip=clip, CORRECTED=False, EARLY=False, LOSS=None, MAPS=False,
        )  # fmt: skip
        reverse(chunks, d_state, states_after, grads.u)
        chunk_plan.launch(gradients, (plan.slots(len(chunks)) * plan.heads,), chunks, chunk_arguments)
    return sequence_parts.split(d_state, plan.parts)[0].mT.contiguous() if has_state else absent(operands.u)


@torch.library.custom_op(
    "deltalab::scalar_scan_backward",
    mutates_args=(),
    schema=f"({SCALAR.schema()}, {KEPT.schema()}, Tensor? cu_seqlens, Tensor? d_o, Tensor? d_last, bool has_state,"
    " float scale, bool late, bool early, SymInt chunk_size) -> Tensor[]",
)
def _scalar_backward(*arguments: Any) -> list[Tensor]:
    """Returns the gradients of the operands and of the state. What was not given has `absent`."""
    operands, more = SCALAR.split(arguments)
    kept, more = KEPT.split(more)
    cu_seqlens, d_o, d_last, has_state, scale, late, early, chunk_size = more
    plan, u = ScalarLaunch.of(operands.k, operands.u, cu_seqlens, chunk_size), operands.u
    outputs = empty_like(operands, u)
    operands, grads = SCALAR.narrowed(operands), ScalarOperands._make(map(existing, outputs))
    d_o = torch.zeros_like(u) if d_o is None else d_o.contiguous()
    d_state = _backward(plan, operands, grads, kept, d_o, d_last, has_state, scale, late, early)
    return [*outputs, d_state]


@torch.library.custom_op(
    "deltalab::residual_scan_backward",
    mutates_args=(),
    schema=f"({SCALAR.schema()}, {FIT.schema('fit_')}, {KEPT.schema()}, {KEPT.schema('fit_')}, Tensor? cu_seqlens,"
    " Tensor residual, Tensor? d_o, Tensor? d_last, Tensor? d_fit_last, bool has_state, bool has_fit_state,"
    " float scale, bool late, str loss, float clip, SymInt chunk_size) -> Tensor[]",
)
def _residual_backward(*arguments: Any) -> list[Tensor]:
    """Returns the gradients of both passes' operands and of both states. What was not given has `absent`."""
    first, more = SCALAR.split(arguments)
    fit, more = FIT.split(more)
    kept, more = KEPT.split(more)
    fit_kept, more = KEPT.split(more)
    cu_seqlens, residual, d_o, d_last, d_fit_last, has_state, has_fit_state, scale, late, loss, clip, chunk_size = more
    plan, u = ScalarLaunch.of(first.k, first.u, cu_seqlens, chunk_size), first.u
    outputs, fit_outputs = empty_like(first, u), empty_like(fit, u)
    grads, fit_grads = ScalarOperands._make(map(existing, outputs)), FitOperands._make(map(existing, fit_outputs))
    d_o = torch.zeros_like(u) if d_o is None else d_o.contiguous()
    # The backward of the second pass comes first. That of the first pass then adds to gradients of operands that both
    # take.
    d_error = torch.empty_like(u) if fit_grads.target is None else fit_grads.target
    d_fit_state = _backward(
        plan, fit.after(first, residual), fit_grads.after(grads, d_error), fit_kept, d_o, d_fit_last, has_fit_state,
        scale, late, False, loss=loss, clip=clip,
    )  # fmt: skip
    d_state = _backward(
        plan, first, grads, kept, d_o, d_last, has_state, scale, late, True, d_error=d_error,
        predicts_u=fit.target is None,
        more_r=grads.r if fit.r is None else None, more_k=grads.k, more_g=grads.g if fit.g is None else None,
    )  # fmt: skip
    return [*outputs, *fit_outputs, d_state, d_fit_state]


def _scalar_shapes(
    *, state: Tensor | None, cu_seqlens: Tensor | None, scale: float, late: bool, early: bool, chunk_size: int,
    keep: bool, **operands: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Empty outputs of `scalar_scan`."""
    first = SCALAR.narrowed(ScalarOperands(**operands))
    plan = ScalarLaunch.of(first.k, first.u, cu_seqlens, chunk_size)
    return torch.empty_like(first.u), _last(plan, first.u), *_kept(plan, first, keep)


def _residual_shapes(*, cu_seqlens: Tensor | None, chunk_size: int, keep: bool, **arguments: Any) -> tuple[Tensor, ...]:
    """Empty outputs of `residual_scan`."""
    first = ScalarOperands._make(arguments[name] for name in SCALAR.names)
    fit = FitOperands._make(arguments[name] for name in FIT.prefixed("fit_"))
    plan, u = ScalarLaunch.of(first.k, first.u, cu_seqlens, chunk_size), first.u
    kept, fit_kept = _kept(plan, first, keep, predicts=True), _kept(plan, fit.after(first, u), keep)
    return torch.empty_like(u), _last(plan, u), _last(plan, u), torch.empty_like(u), *kept, *fit_kept


def _gradient_shapes(operands: Sequence[str], states: Sequence[str]) -> Callable[..., list[Tensor]]:
    """Returns a function that makes empty gradients of the operands and states with the given names."""

    def shapes(*, k: Tensor, u: Tensor, cu_seqlens: Tensor | None, chunk_size: int, **arguments: Any) -> list[Tensor]:
        plan = ScalarLaunch.of(k, u, cu_seqlens, chunk_size)
        arguments.update(k=k, u=u)
        grads = empty_like((arguments[name] for name in operands), u)
        return [*grads, *(_last(plan, u) if arguments[f"has_{name}"] else absent(u) for name in states)]

    return shapes


register(_scalar_backward, shapes=_gradient_shapes(SCALAR.names, ["state"]))
register(
    scalar_scan, shapes=_scalar_shapes, backward=_scalar_backward, outputs=["o", "last", *KEPT.names], results=2
)  # fmt: skip
register(
    _residual_backward,
    shapes=_gradient_shapes([*SCALAR.names, *FIT.prefixed("fit_")], ["state", "fit_state"]),
)
register(
    residual_scan, shapes=_residual_shapes, backward=_residual_backward,
    outputs=["o", "last", "fit_last", "residual", *KEPT.names, *KEPT.prefixed("fit_")], results=3,
)  # fmt: skip
