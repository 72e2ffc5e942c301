"""One token for every structure of the algebra, in one launch that takes as long as reading and writing the state."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compiled import launch
from deltalab.kernels.register import absent, eager, register
from deltalab.kernels.scalar.forward import pseudo_residual
from deltalab.rule import Operands, State
from deltalab.structure import Transition

WIDTH = 32
"""Columns of the state that a program holds: 128 bytes of each row, and enough programs for a small batch."""


@triton.jit
@no_type_check
def vector(x, row, at, size):
    """x[row] of x [.., size], in fp32, with zeros from `size` on."""
    return tl.load(x + row * size + at, mask=at < size, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def scalar(x, row):
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
    """The `block` of a state in fp32; zeros where state is None."""
    if state is None:
        return tl.zeros([BK, BV], dtype=tl.float32)
    at, there = block(state, head, key, value, K, V)
    return tl.load(at, mask=there, other=0.0).to(tl.float32)


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
    second_r, target, strength, second_read, second_g, second_e,
    state, second, o, last, second_last,
    scale, clip,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STEPS: tl.constexpr, DIAGONAL: tl.constexpr, LATE: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """One program for each block of BV values of each head of each sequence; it holds all K rows of the block."""
    head = tl.program_id(0)
    key = tl.arange(0, BK)
    value = tl.program_id(1) * BV + tl.arange(0, BV)
    s = load(state, head, key, value, K, V, BK, BV)
    if LOSS is not None:  # Load before the first store: the compiler moves no load ahead of a store.
        fitted = load(second, head, key, value, K, V, BK, BV)

    first_row = head // H * (STEPS * H) + head % H
    k_0 = vector(k, first_row, key, K)
    reading = vector(r, head, key, K)
    if read is not None:
        reading *= scalar(read, head)
    if d is not None:
        reading -= scalar(d, first_row) * k_0
    if LOSS is not None:
        base = tl.sum(reading[:, None] * s, 0)
        error = vector(target, first_row, value, V) - tl.sum(k_0[:, None] * s, 0)
        learned = scalar(strength, first_row) * pseudo_residual(error, clip, LOSS)

    for i in tl.static_range(STEPS):
        row = first_row + i * H
        u_i = vector(u, row, value, V)
        if beta is not None:
            u_i *= scalar(beta, row)
        s = step(s, vector(k, row, key, K), u_i, g, e, a, b, row, key, K, DIAGONAL, LATE)
    at, there = block(last, head, key, value, K, V)
    tl.store(at, s, mask=there)

    if LOSS is not None:
        s = step(fitted, k_0, learned, second_g, second_e, a, b, first_row, key, K, DIAGONAL, LATE)
        at, there = block(second_last, head, key, value, K, V)
        tl.store(at, s, mask=there)
        reading = vector(second_r, head, key, K)
        if second_read is not None:
            reading *= scalar(second_read, head)
    out = tl.sum(reading[:, None] * s, 0)
    if LOSS is not None:
        out += base
    tl.store(o + head * V + value, (scale * out).to(o.dtype.element_ty), mask=value < V)


@torch.library.custom_op("deltalab::decode", mutates_args=())
def _decode(
    r: Tensor,
    k: Tensor,
    u: Tensor,
    g: Tensor | None,
    e: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    beta: Tensor | None,
    read: Tensor | None,
    d: Tensor | None,
    second_r: Tensor | None,
    target: Tensor | None,
    strength: Tensor | None,
    second_read: Tensor | None,
    second_g: Tensor | None,
    second_e: Tensor | None,
    state: Tensor | None,
    second: Tensor | None,
    scale: float,
    late: bool,
    steps: int,
    loss: str | None,
    clip: float,
) -> list[Tensor]:
    """The output, the state and, with a loss, the second state; all tensors contiguous."""
    out = _outputs(r, k, u, loss)
    batch, _, heads, key_dim = r.shape
    value_dim = u.shape[-1]
    bk, bv = max(16, triton.next_power_of_2(key_dim)), min(WIDTH, max(16, triton.next_power_of_2(value_dim)))
    o, last, second_last = out
    operands = {
        "r": r, "k": k, "u": u, "g": g, "e": e, "a": a, "b": b, "beta": beta, "read": read, "d": d,
        "second_r": second_r, "target": target, "strength": strength, "second_read": second_read,
        "second_g": second_g, "second_e": second_e, "state": state, "second": second, "o": o, "last": last,
        "second_last": second_last if loss else None, "scale": scale, "clip": clip,
    }  # fmt: skip
    sizes = {
        "H": heads, "K": key_dim, "V": value_dim, "BK": bk, "BV": bv, "STEPS": steps,
        "DIAGONAL": g is not None and g.dim() == 4, "LATE": late, "LOSS": loss,
    }  # fmt: skip
    grid = batch * heads, triton.cdiv(value_dim, bv)
    launch(decode_kernel, grid, operands, sizes, num_warps=8 if bk > 128 else 4)
    return out


def _outputs(r: Tensor, k: Tensor, u: Tensor, loss: str | None) -> list[Tensor]:
    last = u.new_empty(r.shape[0], r.shape[2], k.shape[-1], u.shape[-1], dtype=torch.float32)
    return [u.new_empty(*r.shape[:3], u.shape[-1]), last, torch.empty_like(last) if loss else absent(u)]


def _shapes(*, r: Tensor, k: Tensor, u: Tensor, loss: str | None, **_: Any) -> list[Tensor]:
    return _outputs(r, k, u, loss)


register(_decode, shapes=_shapes)
_eagerly = eager(_decode)


def decode(transition: Transition, x: Operands, *, scale: float, state: State | None) -> tuple[Tensor, State]:
    """`reference.recurrent` for one token, T = 1: o [B, 1, H, V] in u's dtype, and a new state in fp32.

    x: `Operands` with B and H in full, and n rows where the transition takes n steps. state: a tuple of one
    [B, H, K, V], of two with a fit; None if empty. Each is read and written once. There is no gradient.
    """
    fit = x.fit
    first, second = (*(state or ()), None, None)[:2]
    given: dict[str, Tensor | None] = {  # in the order of the operator
        "r": x.r, "k": x.k, "u": x.u, "g": x.g, "e": x.e, "a": x.a, "b": x.b, "beta": x.beta, "read": x.read, "d": x.d,
        "second_r": None, "target": None, "strength": None, "second_read": None, "second_g": None, "second_e": None,
        "state": first, "second": second,
    }  # fmt: skip
    if fit is not None:
        own = fit.operands(x)
        given |= {"second_r": own.r, "target": fit.v, "strength": own.beta}
        given |= {"second_read": own.read, "second_g": own.g, "second_e": own.e}
    o, last, second_last = _eagerly(
        *(None if one is None else one.contiguous() for one in given.values()),
        scale,
        transition.reads == "decayed_state",
        transition.steps,
        None if fit is None else fit.residual.loss,
        0.0 if fit is None else fit.residual.clip,
    )
    return o, (last,) if fit is None else (last, second_last)
