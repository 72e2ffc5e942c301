"""SiLU of one half of a product's columns times the other half, read and written where the product lies."""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import launch
from deltalab.kernels.register import register

COLUMNS = 1024
"""The most columns of a program: 8 for each thread of 4 warps, 16 bytes in 16 bits."""

ROWS = 4
"""Rows of a program."""


@triton.jit
@no_type_check
def tile(x, rows, STRIDE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Pointers to a program's tile of the first D columns of x [rows, STRIDE], and the mask of elements that exist."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    column = tl.program_id(1) * BD + tl.arange(0, BD)[None, :]
    return x + row.to(tl.int64) * STRIDE + column, (row < rows) & (column < D)


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def swiglu_kernel(x, y, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Computes one tile of y."""
    at, mask = tile(x, rows, 2 * D, D, BD, BR)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + D, mask=mask, other=0.0).to(tl.float32)
    at, _ = tile(y, rows, D, D, BD, BR)
    tl.store(at, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def swiglu_backward_kernel(x, d_y, d_x, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Computes one tile of each half of d_x."""
    at, mask = tile(d_y, rows, D, D, BD, BR)
    d_out = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at, _ = tile(x, rows, 2 * D, D, BD, BR)
    gate = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(at + D, mask=mask, other=0.0).to(tl.float32)
    gate_sigmoid = tl.sigmoid(gate)
    at, _ = tile(d_x, rows, 2 * D, D, BD, BR)
    d_gate = d_out * up * gate_sigmoid * (1 + gate * (1 - gate_sigmoid))
    tl.store(at, d_gate.to(d_x.dtype.element_ty), mask=mask)
    tl.store(at + D, (d_out * gate * gate_sigmoid).to(d_x.dtype.element_ty), mask=mask)


def _launch(kernel: Any, *tensors: Tensor) -> None:
    """Launches a kernel on tensors, the first of which has twice the columns."""
    width = tensors[0].shape[-1] // 2
    rows = tensors[0].numel() // (2 * width)
    block = min(COLUMNS, triton.next_power_of_2(width))
    grid = triton.cdiv(rows, ROWS), triton.cdiv(width, block)
    operands = dict(zip(kernel.arg_names, tensors, strict=False))
    launch(kernel, grid, operands, {"rows": rows, "D": width, "BD": block, "BR": ROWS})


@torch.library.custom_op("deltalab::swiglu", mutates_args=())
def swiglu(x: Tensor) -> Tensor:
    """Computes SiLU(a) * b [.., D] for x = [a, b] [.., 2 D] in bf16, fp16 or fp32, in fp32 inside."""
    y = _output(x=x)
    _launch(swiglu_kernel, x.contiguous(), y)
    return y


def _output(*, x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@torch.library.custom_op("deltalab::swiglu_backward", mutates_args=())
def _backward(x: Tensor, d_y: Tensor) -> Tensor:
    """The gradient of x, in one tensor."""
    d_x = _gradient(x=x)
    _launch(swiglu_backward_kernel, x.contiguous(), d_y.contiguous(), d_x)
    return d_x


def _gradient(*, x: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _stacked(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int]:
    return swiglu(x.movedim(in_dims[0] or 0, 0)), 0


register(_backward, shapes=_gradient, fold=False)
register(swiglu, shapes=_output, backward=_backward, outputs=["y"], fold=False)
swiglu.register_vmap(_stacked)
