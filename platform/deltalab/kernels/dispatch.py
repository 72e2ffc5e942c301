"""The recurrence by the Triton kernel of its structure, from the operands that `ops.reference.chunked` takes."""

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.kernels.decode import decode
from deltalab.kernels.diagonal import op as diagonal
from deltalab.kernels.register import eager
from deltalab.kernels.scalar import op as scalar
from deltalab.rule import Fit, Operands, State
from deltalab.structure import Transition

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
diagonal_scan, residual_scan, scalar_scan = map(
    eager, (diagonal.diagonal_scan, scalar.residual_scan, scalar.scalar_scan)
)

MOST_KEYS = 256
"""The largest K that the kernels take, padding included: a block holds all of it."""


def scan(
    transition: Transition,
    x: Operands,
    *,
    dtype: torch.dtype,
    scale: float,
    state: State | None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, State]:
    """The function of `reference.recurrent`: o [B, T, H, V] in `dtype`, and the next state in fp32.

    dtype: of the products: bf16, fp16 or fp32. chunk_size: None for the fastest that was measured.
    cu_seqlens: [N + 1], the bounds of packed sequences, where B = 1; states are [N, H, K, V] then.
    Raises `InputError` for a dtype, a key_dim or a structure that the kernels do not take.
    """
    key_dim, value_dim = x.k.shape[-1], x.u.shape[-1]
    if dtype not in DTYPES:
        raise InputError(f"the Triton kernels take q, k and v in bf16, fp16 or fp32, not {dtype}")
    if key_dim > MOST_KEYS:
        raise InputError(f"the Triton kernels take q and k with K up to {MOST_KEYS}, not {key_dim}")
    # Compare before casts make copies: a tensor that both passes take is read once and has one gradient.
    alike = (False, False) if x.fit is None else (x.fit.v is x.u, x.fit.r is x.r)
    x = _in(dtype, x)
    if x.r.shape[1] == 1 and cu_seqlens is None and not (torch.is_grad_enabled() and _needs_grad(x, state)):
        return decode(transition, x, scale=scale, state=state)
    x = _padded(x, max(16, 1 << (key_dim - 1).bit_length()) - key_dim, -value_dim % 16)
    first, second = (None, None) if state is None else [_grown(one, x) for one in (*state, None)[:2]]
    chunk_size = chunk_size or _chunk(x)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens * transition.steps
    if x.fit is None:
        if transition.steps > 1:
            x = dataclasses.replace(
                x,
                r=_repeated(x.r, transition.steps),
                read=None if x.read is None else _repeated(x.read, transition.steps),
            )
            o, last = _pass(transition, x, scale, first, cu_seqlens, chunk_size)
            o = o[:, transition.steps - 1 :: transition.steps]
        else:
            o, last = _pass(transition, x, scale, first, cu_seqlens, chunk_size)
        after = [last]
    else:
        o, *after = _passes(transition, x, alike, scale, (first, second), cu_seqlens, chunk_size)
    if o.shape[-1] > value_dim:
        o = o[..., :value_dim]
    return o, tuple(_cut(one, key_dim, value_dim) for one in after)


def _pass(
    transition: Transition,
    x: Operands,
    scale: float,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    late, keep = transition.reads == "decayed_state", torch.is_grad_enabled()
    r, k, u, g, e, a, b = _contiguous(x.r, x.k, x.u, x.g, x.e, x.a, x.b)
    scalars = _contiguous(x.beta, x.read, x.d)
    if transition.decay == "diagonal":
        o, last, *_ = diagonal_scan(
            *cast(Any, (r, k, u, g, e, a, b)), *scalars, state, cu_seqlens, scale, late, chunk_size, keep
        )
        return o, last
    if a is not None:
        raise InputError("a free low rank without a diagonal decay has no Triton kernel: use backend 'chunked'")
    o, last, *_ = scalar_scan(*cast(Any, (r, k, u, g, e)), *scalars, state, cu_seqlens, scale, late, chunk_size, keep)
    return o, last


def _passes(
    transition: Transition,
    x: Operands,
    alike: tuple[bool, bool],
    scale: float,
    states: tuple[Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan with a second state: o and both last states.

    alike: whether the second pass's v and r are u and r of the first, so that they need not be read again.
    """
    if transition.decay == "diagonal" or x.a is not None:
        raise InputError(
            "a second state over a diagonal decay or a free low rank has no Triton kernel: use backend 'chunked'"
        )
    fit = cast(Fit, x.fit)
    target, r = (None if same else one for same, one in zip(alike, (fit.v, fit.r), strict=True))
    o, last, second, *_ = residual_scan(
        *cast(Any, _contiguous(x.r, x.k, x.u, x.g, x.e, x.beta, x.read, x.d)),
        *cast(Any, _contiguous(target, r, fit.g, fit.e, fit.strength, fit.read)),
        *states, cu_seqlens, scale, transition.reads == "decayed_state", fit.residual.loss, fit.residual.clip,
        chunk_size, torch.is_grad_enabled(),
    )  # fmt: skip
    return o, last, second


def _contiguous(*given: Tensor | None) -> list[Tensor | None]:
    return [None if one is None else one.contiguous() for one in given]


def takes(transition: Transition, x: Operands, dtype: torch.dtype) -> bool:
    """Whether `scan` takes these operands with products in `dtype`."""
    diagonal = transition.decay == "diagonal"
    return (
        dtype in DTYPES
        and x.k.shape[-1] <= MOST_KEYS
        and not (diagonal and (x.fit is not None or transition.steps > 1))
        and (diagonal or x.a is None)
    )


def _chunk(x: Operands) -> int:
    """The chunk size: 16 for fp32, else 64, or 32 where 64 does not fit or is not precise enough.

    It is not with few channels of keys and an erasure, where most of the writes cancel: RDN's d g at K=16 in bf16 has
    an error of 7.6e-3 in chunks of 64, and of 3.1e-3 in chunks of 32.
    """
    key_dim, erases = x.k.shape[-1], x.e is not None or x.a is not None
    if x.u.element_size() > 2:
        return 16
    return 32 if key_dim > 128 or (key_dim <= 32 and erases) else 64


def _in(dtype: torch.dtype, x: Operands) -> Operands:
    """Vectors in `dtype`, strengths and decays in fp32; a decay for each channel may stay in 16 bits."""
    vectors = ("r", "k", "u", "a", "b", "v")

    def kind(name: str, value: Tensor) -> torch.dtype:
        if name in vectors:
            return dtype
        return value.dtype if name == "g" and value.dim() == 4 and value.dtype in DTYPES else torch.float32

    def others(part: Any) -> dict[str, Tensor]:
        found = {}
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.dtype != kind(name, value):
                found[name] = value.to(kind(name, value))
        return found

    fit = None if x.fit is None else dataclasses.replace(x.fit, **cast(Any, others(x.fit)))
    more = others(x)
    return x.changed(fit=fit, **more) if more or fit is not None else x


def _padded(x: Operands, keys: int, values: int) -> Operands:
    """The operands with so many zeros after keys and values, which neither read, erase nor write."""
    if not keys and not values:
        return x

    def wider(one: Tensor | None, more: int) -> Tensor | None:
        return one if one is None or not more else F.pad(one, (0, more))

    g = x.g if x.g is None or x.g.dim() == 3 else wider(x.g, keys)
    r, k, u = (wider(one, more) for one, more in ((x.r, keys), (x.k, keys), (x.u, values)))
    fit = x.fit
    if fit is not None:
        fit = dataclasses.replace(fit, r=cast(Any, wider(fit.r, keys)), v=cast(Any, wider(fit.v, values)))
    return dataclasses.replace(
        x, **cast(Any, {"r": r, "k": k, "u": u}), g=g, a=wider(x.a, keys), b=wider(x.b, keys), fit=fit
    )


def _cut(state: Tensor, keys: int, values: int) -> Tensor:
    return state if state.shape[-2:] == (keys, values) else state[..., :keys, :values]


def _grown(state: Tensor | None, x: Operands) -> Tensor | None:
    if state is None:
        return None
    more = (0, x.u.shape[-1] - state.shape[-1], 0, x.k.shape[-1] - state.shape[-2])
    return (F.pad(state, more) if any(more) else state).float().contiguous()


def _repeated(x: Tensor, steps: int) -> Tensor:
    return x.repeat_interleave(steps, dim=1)


def _needs_grad(x: Operands, state: State | None) -> bool:
    parts = [*vars(x).values(), *(vars(x.fit).values() if x.fit is not None else ()), *(state or ())]
    return any(isinstance(one, Tensor) and one.requires_grad for one in parts)
