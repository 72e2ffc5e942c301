"""Computes a recurrence by the Triton kernel of its structure, from the operands that `ops.reference.chunked` takes."""

import dataclasses
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.kernel_limits import DTYPES, hindrance
from deltalab.kernels.decode import decode
from deltalab.kernels.diagonal import op as diagonal
from deltalab.kernels.operands import DIAGONAL, READING, SCALAR, WIDTHS, FitOperands, contiguous
from deltalab.kernels.register import eager
from deltalab.kernels.scalar import op as scalar
from deltalab.rule import Fit, Operands, State, fields_of
from deltalab.structure import Transition

diagonal_scan, residual_scan, scalar_scan = map(
    eager, (diagonal.diagonal_scan, scalar.residual_scan, scalar.scalar_scan)
)

FIELDS = {**WIDTHS, "v": "values"}
"""Maps the name of an operand, or of a field of a fit, to its width. Other tensors are numbers."""

VECTORS = {name for name, width in FIELDS.items() if width != "numbers"} - {"g"}
"""The names of the operands that enter products of matrices. They have the dtype of q, k and v."""


def scan(
    transition: Transition,
    operands: Operands,
    *,
    dtype: torch.dtype,
    scale: float,
    state: State | None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, State]:
    """Computes the function of `reference.recurrent`.

    Args:
        transition: The transition of the state.
        operands: The operands with B, T and H in full.
        dtype: The dtype of products: bf16, fp16 or fp32.
        scale: The factor of the output.
        state: One state [B, H, K, V] in a tuple, two with a fit, or None for an empty state. Packed sequences have
            states [N, H, K, V].
        cu_seqlens: The bounds [N + 1] of packed sequences, if B = 1.
        chunk_size: Tokens of a chunk, or None for the number that was fastest when it was measured.

    Returns:
        o [B, T, H, V] in `dtype`, and the next state in fp32.

    Raises:
        InputError: The kernels do not take the dtype, the key_dim or the structure.
    """
    key_dim, value_dim = operands.k.shape[-1], operands.u.shape[-1]
    if why := hindrance(transition, operands, dtype):
        raise InputError(f"{why}: use backend 'chunked'")
    # Compare the operands before casts copy them: a tensor that both passes take is read once and has one gradient.
    fit = operands.fit
    alike = (False, False) if fit is None else (fit.v is operands.u, fit.r is operands.r)
    one_token = operands.r.shape[1] == 1 and cu_seqlens is None
    if one_token and not (torch.is_grad_enabled() and _needs_grad(operands, state)):
        return decode(transition, _in(dtype, operands), scale=scale, state=state)
    operands = _in(dtype, operands, wide=operands.exact_gradients and fit is None)
    operands = _padded(operands, max(16, 1 << (key_dim - 1).bit_length()) - key_dim, -value_dim % 16)
    first, second = (None, None) if state is None else [_grown(tensor, operands) for tensor in (*state, None)[:2]]
    chunk_size = chunk_size or _chunk(operands)
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens * transition.steps
    if fit is not None:
        o, *after = _passes(transition, operands, alike, scale, (first, second), cu_seqlens, chunk_size)
    else:
        if transition.steps > 1:
            operands = _repeated(operands, transition.steps)
        o, last = _pass(transition, operands, scale, first, cu_seqlens, chunk_size)
        if transition.steps > 1:
            o = o[:, transition.steps - 1 :: transition.steps]
        after = [last]
    if o.shape[-1] > value_dim:
        o = o[..., :value_dim]
    return o, tuple(_cut(tensor, key_dim, value_dim) for tensor in after)


def _pass(
    transition: Transition,
    operands: Operands,
    scale: float,
    state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Runs the scan with one state, and returns o and the last state."""
    late, early, keep = transition.reads == "decayed_state", transition.output == "before", torch.is_grad_enabled()
    if transition.decay == "diagonal":
        tensors, one_pass = DIAGONAL.contiguous(operands), diagonal_scan
    else:
        tensors, one_pass = SCALAR.contiguous(operands), scalar_scan
    o, last, *_ = one_pass(*tensors, state, cu_seqlens, scale, late, early, chunk_size, keep)
    return o, last


def _passes(
    transition: Transition,
    operands: Operands,
    alike: tuple[bool, bool],
    scale: float,
    states: tuple[Tensor | None, Tensor | None],
    cu_seqlens: Tensor | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the scan with a second state, and returns o and both last states.

    `alike` says whether the second pass's v is the first pass's u, and whether both passes have one r. A tensor that
    both passes share is not read again.
    """
    fit = cast(Fit, operands.fit)
    target, r = (None if same else tensor for same, tensor in zip(alike, (fit.v, fit.r), strict=True))
    o, last, fit_last, *_ = residual_scan(
        *SCALAR.contiguous(operands),
        *contiguous(FitOperands(target, r, fit.g, fit.e, fit.strength, fit.read)),
        *states, cu_seqlens, scale, transition.reads == "decayed_state", fit.residual.loss, fit.residual.clip,
        chunk_size, torch.is_grad_enabled(),
    )  # fmt: skip
    return o, last, fit_last


def takes(transition: Transition, operands: Operands, dtype: torch.dtype) -> bool:
    """Whether `scan` takes these operands with products in `dtype`."""
    return hindrance(transition, operands, dtype) is None


def _chunk(operands: Operands) -> int:
    """The chunk size: 16 for fp32, else 64, or 32 where 64 does not fit or is not precise enough.

    Chunks of 64 are not precise enough if keys have few channels and the rule erases, because most of the writes then
    cancel. For example, the gradient of RDN's g at K=16 in bf16 has an error of 7.6e-3 in chunks of 64, and of 3.1e-3
    in chunks of 32.
    """
    key_dim, erases = operands.k.shape[-1], operands.e is not None or operands.a is not None
    if operands.u.element_size() > 2:
        return 16
    return 32 if key_dim > 128 or (key_dim <= 32 and erases) else 64


def _in(dtype: torch.dtype, operands: Operands, *, wide: bool = False) -> Operands:
    """Casts vectors to `dtype`, and numbers and decays to fp32. A decay by channel may stay in 16 bits.

    If `wide`, vectors of keys are in fp32, so that their gradients are.
    """

    def dtype_of(name: str, value: Tensor) -> torch.dtype:
        if name in VECTORS:
            return torch.float32 if wide and FIELDS[name] == "keys" else dtype
        return value.dtype if name == "g" and value.dim() == 4 and value.dtype in DTYPES else torch.float32

    def casts(tensors: Operands | Fit) -> dict[str, Any]:
        changes = {}
        for name, value in fields_of(tensors).items():
            if isinstance(value, Tensor) and value.dtype != dtype_of(name, value):
                changes[name] = value.to(dtype_of(name, value))
        return changes

    fit = None if operands.fit is None else dataclasses.replace(operands.fit, **casts(operands.fit))
    changes = casts(operands)
    return operands.changed(fit=fit, **changes) if changes or fit is not None else operands


def _padded(operands: Operands, keys: int, values: int) -> Operands:
    """Returns the operands with `keys` zeros after each vector of keys, and `values` zeros after each vector of values.

    The zeros neither read, erase nor write.
    """
    if not keys and not values:
        return operands

    def pads(tensors: Operands | Fit) -> dict[str, Any]:
        changes = {}
        for name, value in fields_of(tensors).items():
            zeros = {"keys": keys, "values": values}.get(FIELDS.get(name) or "", 0)
            if zeros and isinstance(value, Tensor) and value.dim() == 4:  # A decay may have no channels.
                changes[name] = F.pad(value, (0, zeros))
        return changes

    fit = None if operands.fit is None else dataclasses.replace(operands.fit, **pads(operands.fit))
    return dataclasses.replace(operands, **pads(operands), fit=fit)


def _cut(state: Tensor, keys: int, values: int) -> Tensor:
    """The state without its padding."""
    return state if state.shape[-2:] == (keys, values) else state[..., :keys, :values]


def _grown(state: Tensor | None, operands: Operands) -> Tensor | None:
    """Returns the state, padded like the operands, contiguous and in fp32."""
    if state is None:
        return None
    zeros = (0, operands.u.shape[-1] - state.shape[-1], 0, operands.k.shape[-1] - state.shape[-2])
    return (F.pad(state, zeros) if any(zeros) else state).float().contiguous()


def _repeated(operands: Operands, steps: int) -> Operands:
    """Returns the operands with the rows of `READING`, one for each token, repeated for each of its steps."""
    tensors = {name: getattr(operands, name) for name in READING}
    rows = {name: x.repeat_interleave(steps, dim=1) for name, x in tensors.items() if x is not None}
    return dataclasses.replace(operands, **rows)


def _needs_grad(operands: Operands, state: State | None) -> bool:
    """Whether an operand or a state requires a gradient."""
    values = [*fields_of(operands).values(), *(fields_of(operands.fit).values() if operands.fit is not None else ())]
    return any(isinstance(value, Tensor) and value.requires_grad for value in (*values, *(state or ())))
