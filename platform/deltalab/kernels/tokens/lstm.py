"""The LSTM with exponential gates of `deltalab.nonlinear`: one program for a head of a sequence, with R in registers.

The backward computes the gates again from the states before each token, which the forward keeps.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import launch
from deltalab.kernels.register import eager, register


@triton.jit
@no_type_check
def log_forget(f, LOG_SIGMOID: tl.constexpr):
    """The logarithm of the forget gate, without overflow."""
    return tl.minimum(f, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(f))) if LOG_SIGMOID else f


@triton.jit
@no_type_check
def sigmoid(x):
    """The sigmoid in the dtype of x."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
@no_type_check
def tanh(x):
    """The hyperbolic tangent in the dtype of x, without overflow."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@triton.jit(do_not_specialize=["length"])
@no_type_check
def forward_kernel(
    x, r, h_0, c_0, n_0, m_0, h, c, n, m, length,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOG_SIGMOID: tl.constexpr,
):  # fmt: skip
    """Computes the states after every token of one head."""
    head = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, BV)[:, None], tl.arange(0, BV)
    inside = j < V
    tile = r + head * 4 * V * V + i * V + j[None, :]
    square = (i < V) & inside[None, :]
    r_z = tl.load(tile, mask=square, other=0.0)
    r_i = tl.load(tile + V * V, mask=square, other=0.0)
    r_f = tl.load(tile + 2 * V * V, mask=square, other=0.0)
    r_o = tl.load(tile + 3 * V * V, mask=square, other=0.0)
    now_h = tl.load(h_0 + head * V + j, mask=inside, other=0.0)
    now_c = tl.load(c_0 + head * V + j, mask=inside, other=0.0)
    now_n = tl.load(n_0 + head * V + j, mask=inside, other=0.0)
    now_m = tl.load(m_0 + head * V + j, mask=inside, other=0.0)
    for t in range(length):
        row = (head // H * length + t) * H + head % H
        at = x + row * 4 * V + j
        before = now_h[:, None]
        z = tanh(tl.load(at, mask=inside, other=0.0) + tl.sum(r_z * before, 0))
        write = tl.load(at + V, mask=inside, other=0.0) + tl.sum(r_i * before, 0)
        keep = log_forget(tl.load(at + 2 * V, mask=inside, other=0.0) + tl.sum(r_f * before, 0), LOG_SIGMOID) + now_m
        out = sigmoid(tl.load(at + 3 * V, mask=inside, other=0.0) + tl.sum(r_o * before, 0))
        now_m = tl.maximum(keep, write)
        keep, write = tl.exp(keep - now_m), tl.exp(write - now_m)
        now_c, now_n = keep * now_c + write * z, keep * now_n + write
        now_h = out * now_c / now_n
        tl.store(h + row * V + j, now_h, mask=inside)
        tl.store(c + row * V + j, now_c, mask=inside)
        tl.store(n + row * V + j, now_n, mask=inside)
        tl.store(m + row * V + j, now_m, mask=inside)


@triton.jit
@no_type_check
def before(states, start, row, head, t, j, inside, H: tl.constexpr, V: tl.constexpr):
    """Loads a state before token t: that of the token before, or the start."""
    last = tl.load(states + (row - H) * V + j, mask=inside & (t > 0), other=0.0)
    return tl.where(t > 0, last, tl.load(start + head * V + j, mask=inside, other=0.0))


@triton.jit(do_not_specialize=["length"])
@no_type_check
def backward_kernel(
    x, r, h_0, c_0, n_0, m_0, h, c, n, m, d_h, d_c, d_n, d_m, d_x, d_h_0, d_c_0, d_n_0, d_m_0, length,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, LOG_SIGMOID: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of x and of the start for one head. STATES says whether c, n and m have gradients."""
    head = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, BV)[:, None], tl.arange(0, BV)
    inside = j < V
    tile = r + head * 4 * V * V + i * V + j[None, :]
    square = (i < V) & inside[None, :]
    r_z = tl.load(tile, mask=square, other=0.0)
    r_i = tl.load(tile + V * V, mask=square, other=0.0)
    r_f = tl.load(tile + 2 * V * V, mask=square, other=0.0)
    r_o = tl.load(tile + 3 * V * V, mask=square, other=0.0)
    of_h = tl.zeros([BV], dtype=h.dtype.element_ty)
    of_c = tl.zeros([BV], dtype=h.dtype.element_ty)
    of_n = tl.zeros([BV], dtype=h.dtype.element_ty)
    of_m = tl.zeros([BV], dtype=h.dtype.element_ty)
    for back in range(length):
        t = length - 1 - back
        row = (head // H * length + t) * H + head % H
        at = row * 4 * V + j
        old_h = before(h, h_0, row, head, t, j, inside, H, V)
        old_c = before(c, c_0, row, head, t, j, inside, H, V)
        old_n = before(n, n_0, row, head, t, j, inside, H, V)
        old_m = before(m, m_0, row, head, t, j, inside, H, V)
        now_c = tl.load(c + row * V + j, mask=inside, other=0.0)
        now_n = tl.load(n + row * V + j, mask=inside, other=1.0)
        now_m = tl.load(m + row * V + j, mask=inside, other=0.0)
        z = tanh(tl.load(x + at, mask=inside, other=0.0) + tl.sum(r_z * old_h[:, None], 0))
        write = tl.load(x + at + V, mask=inside, other=0.0) + tl.sum(r_i * old_h[:, None], 0)
        forget = tl.load(x + at + 2 * V, mask=inside, other=0.0) + tl.sum(r_f * old_h[:, None], 0)
        out = sigmoid(tl.load(x + at + 3 * V, mask=inside, other=0.0) + tl.sum(r_o * old_h[:, None], 0))
        keep = log_forget(forget, LOG_SIGMOID) + old_m
        # Of two equal arguments of the maximum, each has half of the gradient.
        kept = tl.where(keep > write, 1.0, tl.where(keep == write, 0.5, 0.0)).to(z.dtype)
        keep, write = tl.exp(keep - now_m), tl.exp(write - now_m)
        of_h += tl.load(d_h + row * V + j, mask=inside, other=0.0)
        if STATES:
            of_c += tl.load(d_c + row * V + j, mask=inside, other=0.0)
            of_n += tl.load(d_n + row * V + j, mask=inside, other=0.0)
            of_m += tl.load(d_m + row * V + j, mask=inside, other=0.0)
        mean = now_c / now_n
        of_out = of_h * mean * out * (1.0 - out)
        of_c += of_h * out / now_n
        of_n -= of_h * out * mean / now_n
        of_m -= now_c * of_c + now_n * of_n
        of_z = write * of_c * (1.0 - z * z)
        of_write = write * (z * of_c + of_n) + (1.0 - kept) * of_m
        of_keep = keep * (old_c * of_c + old_n * of_n) + kept * of_m
        of_forget = of_keep * (1.0 - sigmoid(forget)) if LOG_SIGMOID else of_keep
        of_c, of_n, of_m = keep * of_c, keep * of_n, of_keep
        tl.store(d_x + at, of_z, mask=inside)
        tl.store(d_x + at + V, of_write, mask=inside)
        tl.store(d_x + at + 2 * V, of_forget, mask=inside)
        tl.store(d_x + at + 3 * V, of_out, mask=inside)
        through = r_z * of_z[None, :] + r_i * of_write[None, :] + r_f * of_forget[None, :] + r_o * of_out[None, :]
        of_h = tl.sum(tl.trans(through), 0)
    tl.store(d_h_0 + head * V + j, of_h, mask=inside)
    tl.store(d_c_0 + head * V + j, of_c, mask=inside)
    tl.store(d_n_0 + head * V + j, of_n, mask=inside)
    tl.store(d_m_0 + head * V + j, of_m, mask=inside)


def scan(
    x: Tensor, weights: Tensor, state: tuple[Tensor, ...], /, *, log_sigmoid: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Computes `deltalab.nonlinear.exponential_lstm` for all tokens of x [B, T, H, 4, V], in the dtype of the state."""
    weights = weights.expand(x.shape[0], *weights.shape).contiguous()
    states = _eagerly(x.contiguous(), weights, *(part.contiguous() for part in state), log_sigmoid)
    return states[0], tuple(part[:, -1] for part in states)


def _launch(kernel: Any, x: Tensor, log_sigmoid: bool, operands: dict[str, Any], **more: bool) -> None:
    """Launches a kernel on contiguous tensors, in the kernel's order."""
    batch, length, heads, _, width = x.shape
    sizes = {"H": heads, "V": width, "BV": max(triton.next_power_of_2(width), 16), "LOG_SIGMOID": log_sigmoid, **more}
    launch(kernel, (batch * heads,), {"x": x, **operands, "length": length}, sizes, num_warps=8 if width > 32 else 4)


@torch.library.custom_op("deltalab::exponential_lstm", mutates_args=())
def exponential_lstm(
    x: Tensor, r: Tensor, h_0: Tensor, c_0: Tensor, n_0: Tensor, m_0: Tensor, log_sigmoid: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes h, c, n and m [B, T, H, V] of contiguous tensors of one dtype, fp32 or fp64.

    Args:
        x: z, i, f and o without R h, [B, T, H, 4, V].
        r: R, [B, H, 4, V, V].
        h_0: h before the first token, [B, H, V].
        c_0: c before the first token, [B, H, V].
        n_0: n before the first token, [B, H, V].
        m_0: m before the first token, [B, H, V].
        log_sigmoid: Whether the forget gate is a sigmoid.
    """
    h, c, n, m = _outputs(x=x)
    start = {"r": r, "h_0": h_0, "c_0": c_0, "n_0": n_0, "m_0": m_0}
    _launch(forward_kernel, x, log_sigmoid, {**start, "h": h, "c": c, "n": n, "m": m})
    return h, c, n, m


def _outputs(*, x: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h, c, n, m = (x.new_empty(*x.shape[:3], x.shape[4]) for _ in range(4))
    return h, c, n, m


@torch.library.custom_op("deltalab::exponential_lstm_backward", mutates_args=())
def _backward(
    x: Tensor,
    r: Tensor,
    h_0: Tensor,
    c_0: Tensor,
    n_0: Tensor,
    m_0: Tensor,
    h: Tensor,
    c: Tensor,
    n: Tensor,
    m: Tensor,
    d_h: Tensor | None,
    d_c: Tensor | None,
    d_n: Tensor | None,
    d_m: Tensor | None,
    log_sigmoid: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, r and the states before the first token."""
    d_x, _, d_h_0, d_c_0, d_n_0, d_m_0 = _gradients(x=x, r=r, h_0=h_0)
    states = any(part is not None for part in (d_c, d_n, d_m))
    d_h, *rest = (
        torch.zeros_like(h) if part is None and (states or number == 0) else part if part is None else part.contiguous()
        for number, part in enumerate((d_h, d_c, d_n, d_m))
    )
    given = {"r": r, "h_0": h_0, "c_0": c_0, "n_0": n_0, "m_0": m_0, "h": h, "c": c, "n": n, "m": m, "d_h": d_h}
    given |= dict(zip(("d_c", "d_n", "d_m"), rest, strict=True))
    starts = {"d_h_0": d_h_0, "d_c_0": d_c_0, "d_n_0": d_n_0, "d_m_0": d_m_0}
    _launch(backward_kernel, x, log_sigmoid, {**given, "d_x": d_x, **starts}, STATES=states)
    old_h = torch.cat([h_0[:, None], h[:, :-1]], dim=1)
    d_r = torch.einsum("bthv,bthgw->bhgvw", old_h, d_x).contiguous()
    return d_x, d_r, d_h_0, d_c_0, d_n_0, d_m_0


def _gradients(*, x: Tensor, r: Tensor, h_0: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_h_0, d_c_0, d_n_0, d_m_0 = (torch.empty_like(h_0) for _ in range(4))
    return torch.empty_like(x), torch.empty_like(r), d_h_0, d_c_0, d_n_0, d_m_0


register(_backward, shapes=_gradients)
register(exponential_lstm, shapes=_outputs, backward=_backward, outputs=["h", "c", "n", "m"])
_eagerly = eager(exponential_lstm)
