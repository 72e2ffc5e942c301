"""The element-wise recurrence h_t = a_t h_{t-1} + b_t, real or complex: one program for a block of channels.

A program goes through all tokens with its part of the state in registers. It reads a and b once and writes h once.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import INTERPRETED, launch
from deltalab.kernels.register import eager, register

CHANNELS = 2048 if INTERPRETED else 64
"""The most channels of a program. It waits for memory at every token, so that a GPU is faster with many small ones."""


@triton.jit(do_not_specialize=["length"])
@no_type_check
def forward_kernel(
    a, b, start, h, length,
    C: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    """Computes h of one block of channels of one sequence. A complex number has two PARTS, the real one first."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = channel < C
    at = PARTS * (row * C + channel)
    x = tl.load(start + at, mask=inside, other=0.0)
    y = tl.load(start + at + PARTS - 1, mask=inside, other=0.0)
    at = PARTS * (row * C * (length if MOVING else 1) + channel)
    a_x = tl.load(a + at, mask=inside, other=0.0)
    a_y = tl.load(a + at + PARTS - 1, mask=inside, other=0.0)
    for t in range(length):
        at = PARTS * ((row * length + t) * C + channel)
        if MOVING:
            a_x = tl.load(a + at, mask=inside, other=0.0)
        if PARTS == 2:
            if MOVING:
                a_y = tl.load(a + at + 1, mask=inside, other=0.0)
            turned = a_x * x - a_y * y
            y = a_y * x + a_x * y + tl.load(b + at + 1, mask=inside, other=0.0)
            x = turned + tl.load(b + at, mask=inside, other=0.0)
            tl.store(h + at + 1, y, mask=inside)
        else:
            x = a_x * x + tl.load(b + at, mask=inside, other=0.0)
        tl.store(h + at, x, mask=inside)


@triton.jit(do_not_specialize=["length"])
@no_type_check
def backward_kernel(
    a, start, h, d_h, d_a, d_b, d_start, length,
    C: tl.constexpr, BC: tl.constexpr, PARTS: tl.constexpr, MOVING: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one block of channels of one sequence.

        d_b_t = d_h_t + conj(a_{t+1}) d_b_{t+1},   d_a_t = d_b_t conj(h_{t-1})

    Where a is the same for all tokens, d_a is the sum over them.
    """
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = channel < C
    first = PARTS * (row * C + channel)
    at = PARTS * (row * C * (length if MOVING else 1) + channel)
    a_x = tl.load(a + at, mask=inside, other=0.0)
    a_y = tl.load(a + at + PARTS - 1, mask=inside, other=0.0)
    x = tl.zeros([BC], dtype=start.dtype.element_ty)  # conj(a_{t+1}) d_b_{t+1}
    y = tl.zeros([BC], dtype=start.dtype.element_ty)
    sum_x = tl.zeros([BC], dtype=start.dtype.element_ty)
    sum_y = tl.zeros([BC], dtype=start.dtype.element_ty)
    for back in range(length):
        t = length - 1 - back
        at = PARTS * ((row * length + t) * C + channel)
        h_x = tl.load(h + at - PARTS * C, mask=inside & (t > 0), other=0.0)
        h_x += tl.load(start + first, mask=inside & (t == 0), other=0.0)
        x += tl.load(d_h + at, mask=inside, other=0.0)
        tl.store(d_b + at, x, mask=inside)
        if MOVING:
            a_x = tl.load(a + at, mask=inside, other=0.0)
        if PARTS == 2:
            h_y = tl.load(h + at - PARTS * C + 1, mask=inside & (t > 0), other=0.0)
            h_y += tl.load(start + first + 1, mask=inside & (t == 0), other=0.0)
            y += tl.load(d_h + at + 1, mask=inside, other=0.0)
            tl.store(d_b + at + 1, y, mask=inside)
            if MOVING:
                a_y = tl.load(a + at + 1, mask=inside, other=0.0)
            d_x, d_y = x * h_x + y * h_y, y * h_x - x * h_y
            turned = a_x * x + a_y * y
            y = a_x * y - a_y * x
            x = turned
            if MOVING:
                tl.store(d_a + at + 1, d_y, mask=inside)
            else:
                sum_y += d_y
        else:
            d_x = x * h_x
            x = a_x * x
        if MOVING:
            tl.store(d_a + at, d_x, mask=inside)
        else:
            sum_x += d_x
    tl.store(d_start + first, x, mask=inside)
    if not MOVING:
        tl.store(d_a + first, sum_x, mask=inside)
    if PARTS == 2:
        tl.store(d_start + first + 1, y, mask=inside)
        if not MOVING:
            tl.store(d_a + first + 1, sum_y, mask=inside)


def scan(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """Computes `deltalab.elementwise.Scan` by kernels, in the dtype of `start`."""
    if not start.is_complex():
        real: Tensor = _eagerly(a.contiguous(), b.contiguous(), start.contiguous(), 1)
        return real
    return torch.view_as_complex(
        _eagerly(*(torch.view_as_real(x.resolve_conj().contiguous()) for x in (a, b, start)), 2)
    )


def _launch(kernel: Any, parts: int, length: int, **tensors: Tensor) -> None:
    """Launches a kernel on contiguous tensors, in the kernel's order."""
    start = tensors["start"]
    channels = start[0].numel() // parts
    block = min(CHANNELS, triton.next_power_of_2(channels))
    sizes = {"C": channels, "BC": block, "PARTS": parts, "MOVING": tensors["a"].shape[1] > 1}
    grid = triton.cdiv(channels, block), start.shape[0]
    launch(kernel, grid, {**tensors, "length": length}, sizes, num_warps=2)


@torch.library.custom_op("deltalab::elementwise", mutates_args=())
def elementwise(a: Tensor, b: Tensor, start: Tensor, parts: int) -> Tensor:
    """Computes h [B, T, *D] of contiguous a [B, 1 or T, *D], b [B, T, *D] and start [B, *D], all fp32 or all fp64.

    With 2 parts, the last axis of each holds the real and the imaginary part of complex numbers.
    """
    h = torch.empty_like(b)
    _launch(forward_kernel, parts, b.shape[1], a=a, b=b, start=start, h=h)
    return h


def _output(*, b: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(b)


@torch.library.custom_op("deltalab::elementwise_backward", mutates_args=())
def _backward(a: Tensor, start: Tensor, h: Tensor, d_h: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a, b and start."""
    d_a, d_b, d_start = _gradients(a=a, start=start, h=h)
    _launch(
        backward_kernel, parts, h.shape[1],
        a=a, start=start, h=h, d_h=d_h.contiguous(), d_a=d_a, d_b=d_b, d_start=d_start,
    )  # fmt: skip
    return d_a, d_b, d_start


def _gradients(*, a: Tensor, start: Tensor, h: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(h), torch.empty_like(start)


register(_backward, shapes=_gradients)
register(elementwise, shapes=_output, backward=_backward, outputs=["h"])
_eagerly = eager(elementwise)
