"""Computes one token of any structure in one launch, which takes as long as reading and writing the state."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import launch
from deltalab.kernels.operands import FIT, WIDTHS, FitOperands, contiguous
from deltalab.kernels.register import absent, eager, register
from deltalab.kernels.scalar.forward import pseudo_residual
from deltalab.rule import Operands, State
from deltalab.structure import Transition

WIDTH = 32
"""Columns of the state that a program holds: 128 bytes of each row, so that a small batch has enough programs."""


@triton.jit
@no_type_check
def vector(x, row, at, size):
    """Loads the elements `at` of x[row] in fp32, for x [.., size]. Elements from `size` on are 0."""
    return tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def scalar(x, row):
    """Loads x[row] in fp32."""
    return tl.load(x + row).to(tl.float32)


@triton.jit
@no_type_check
def block(state, head, key, value, K: tl.constexpr, V: tl.constexpr):
    """Pointers to a block of a head's state [K, V], and the mask of the elements that exist."""
    at = state + head.to(tl.int64) * (K * V) + key[:, None] * V + value[None, :]
    return at, (key < K)[:, None] & (value < V)[None, :]


@triton.jit
@no_type_check
def load(state, head, key, value, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Loads the `block` of a state in fp32; zeros if the state is None."""
    if state is None:  # Triton compiles what follows a return within an if, too.
        s = tl.zeros([BK, BV], dtype=tl.float32)
    else:
        at, mask = block(state, head, key, value, K, V)
        s = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return s


@triton.jit
@no_type_check
def step(s, k, u, g, e, a, b, row, key, K: tl.constexpr, DIAGONAL: tl.constexpr, LATE: tl.constexpr):
    """The state s [BK, BV] after a step that writes u [BV] along k [BK]; g, e, a and b are pointers or None."""
    decayed = s
    if g is not None:
        decayed = tl.exp(vector(g, row, key, K))[:, None] * s if DIAGONAL else tl.exp(scalar(g, row)) * s
    seen = decayed if LATE else s
    if e is not None:
        u -= scalar(e, row) * tl.sum(k[:, None] * seen, 0)
    after = decayed + k[:, None] * u[None, :]
    if a is not None:
        erased = tl.sum(vector(b, row, key, K)[:, None] * seen, 0)
        after += vector(a, row, key, K)[:, None] * erased[None, :]
    return after


@triton.jit
@no_type_check
def decode_kernel(
    r, k, u, g, e, a, b, beta, read, d,
    fit_r, fit_target, fit_beta, fit_read, fit_g, fit_e,
    state, fit_state, o, last, fit_last,
    scale, clip,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STEPS: tl.constexpr, DIAGONAL: tl.constexpr, LATE: tl.constexpr, EARLY: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """Computes one token. A program holds all K rows and BV columns of the state of one head of one sequence.

    If EARLY, as with a LOSS, the token reads the first state before it writes.
    """
    head = tl.program_id(0)
    key = tl.arange(0, BK)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    s = load(state, head, key, value, K, V, BK, BV)
    if LOSS is not None:  # Load before the first store: the compiler moves no load ahead of a store.
        fit_s = load(fit_state, head, key, value, K, V, BK, BV)

    row_0 = head // H * (STEPS * H) + head % H
    k_0 = vector(k, row_0, key, K)
    reading = vector(r, head, key, K)
    if read is not None:
        reading *= scalar(read, head)
    if d is not None:
        reading -= scalar(d, row_0) * k_0
    if EARLY:
        out = tl.sum(reading[:, None] * s, 0)
    if LOSS is not None:
        error = vector(fit_target, row_0, value, V) - tl.sum(k_0[:, None] * s, 0)
        learned = scalar(fit_beta, row_0) * pseudo_residual(error, clip, LOSS)

    for i in tl.static_range(STEPS):
        row = row_0 + i * H
        u_i = vector(u, row, value, V)
        if beta is not None:
            u_i *= scalar(beta, row)
        s = step(s, vector(k, row, key, K), u_i, g, e, a, b, row, key, K, DIAGONAL, LATE)
    at, mask = block(last, head, key, value, K, V)
    tl.store(at, s, mask=mask)

    if LOSS is not None:
        s = step(fit_s, k_0, learned, fit_g, fit_e, a, b, row_0, key, K, DIAGONAL, LATE)
        at, mask = block(fit_last, head, key, value, K, V)
        tl.store(at, s, mask=mask)
        reading = vector(fit_r, head, key, K)
        if fit_read is not None:
            reading *= scalar(fit_read, head)
        out += tl.sum(reading[:, None] * s, 0)
    if not EARLY:
        out = tl.sum(reading[:, None] * s, 0)
    tl.store(o + head * V + value, (scale * out).to(o.dtype.element_ty), mask=value < V)


TENSORS = [*WIDTHS, *FIT.prefixed("fit_"), "state", "fit_state"]
"""The names of the tensors that the operator takes, in order: operands of all structures, operands of a fit, and both
states."""


@torch.library.custom_op(
    "deltalab::decode",
    mutates_args=(),
    schema=f"(Tensor? {', Tensor? '.join(TENSORS)}, float scale, bool late, bool early, SymInt steps, str? loss,"
    " float clip) -> Tensor[]",
)
def _decode(*arguments: Any) -> list[Tensor]:
    """Returns the output, the state and, with a loss, the second state. All tensors are contiguous."""
    operands = dict(zip(TENSORS, arguments, strict=False))
    scale, late, early, steps, loss, clip = arguments[len(TENSORS) :]
    r, k, u, g = (operands[name] for name in "rkug")
    outputs = _outputs(r, k, u, loss)
    batch, _, heads, key_dim = r.shape
    value_dim = u.shape[-1]
    bk, bv = max(16, triton.next_power_of_2(key_dim)), min(WIDTH, max(16, triton.next_power_of_2(value_dim)))
    o, last, fit_last = outputs
    operands |= {"o": o, "last": last, "fit_last": fit_last if loss else None, "scale": scale, "clip": clip}
    sizes = {
        "H": heads, "K": key_dim, "V": value_dim, "BK": bk, "BV": bv, "STEPS": steps,
        "DIAGONAL": g is not None and g.dim() == 4, "LATE": late, "EARLY": early, "LOSS": loss,
    }  # fmt: skip
    grid = batch * heads, triton.cdiv(value_dim, bv)
    launch(decode_kernel, grid, operands, sizes, num_warps=8 if bk > 128 else 4)
    return outputs


def _outputs(r: Tensor, k: Tensor, u: Tensor, loss: str | None) -> list[Tensor]:
    """Allocates the outputs."""
    last = u.new_empty(r.shape[0], r.shape[2], k.shape[-1], u.shape[-1], dtype=torch.float32)
    return [u.new_empty(*r.shape[:3], u.shape[-1]), last, torch.empty_like(last) if loss else absent(u)]


def _shapes(*, r: Tensor, k: Tensor, u: Tensor, loss: str | None, **_: Any) -> list[Tensor]:
    """Empty outputs of the operator."""
    return _outputs(r, k, u, loss)


register(_decode, shapes=_shapes)
_eagerly = eager(_decode)


def decode(transition: Transition, operands: Operands, *, scale: float, state: State | None) -> tuple[Tensor, State]:
    """Computes `reference.recurrent` for one token, T = 1. There is no gradient.

    Args:
        transition: The transition of the state.
        operands: The operands with B and H in full, and n rows if the transition takes n steps.
        scale: The factor of the output.
        state: One state [B, H, K, V] in a tuple, two with a fit, or None for an empty state. Each is read and written
            once.

    Returns:
        o [B, 1, H, V] in u's dtype, and a new state in fp32.
    """
    fit = operands.fit
    first, second = (*(state or ()), None, None)[:2]
    if fit is None:
        of_fit: list[Tensor | None] = [None] * len(FIT.names)
    else:
        second_pass = fit.operands(operands)
        of_fit = [*FitOperands(fit.v, second_pass.r, second_pass.g, second_pass.e, fit.strength, fit.read)]
    o, last, fit_last = _eagerly(
        *contiguous((*(getattr(operands, name) for name in WIDTHS), *of_fit, first, second)),
        scale,
        transition.reads == "decayed_state",
        transition.output == "before" or fit is not None,
        transition.steps,
        None if fit is None else fit.residual.loss,
        0.0 if fit is None else fit.residual.clip,
    )
    return o, (last,) if fit is None else (last, fit_last)
