"""Residual addition, RMS norm and gate in one pass; each of the three may be missing."""

from collections.abc import Sequence
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from deltalab.kernels.compilations import launch
from deltalab.kernels.register import ByName, absent, existing, register

TILE = 2048
"""Elements that a program holds at a time, in whole rows: 16 for each thread of 4 warps."""

PROGRAMS = 512
"""Programs of the backward, about 4 for each multiprocessor. Each sums the weights' gradient over many tiles."""


@triton.jit
@no_type_check
def tile(x, run, i, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Pointers to the i-th BR rows of a run in x [n, rows, D], and the mask of elements that exist."""
    row, column = tl.arange(0, BR)[:, None], tl.arange(0, BD)[None, :]
    first_row = i * BR
    return x + (run.to(tl.int64) * rows + first_row) * D + (row * D + column), (row < rows - first_row) & (column < D)


@triton.jit
@no_type_check
def load(x, run, i, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Loads a `tile` in fp32; elements that do not exist are 0."""
    at, mask = tile(x, run, i, rows, D, BD, BR)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def store(x, value, run, i, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr):
    """Stores a `tile`."""
    at, mask = tile(x, run, i, rows, D, BD, BR)
    tl.store(at, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def weights(w, run, D: tl.constexpr, BD: tl.constexpr):
    """Loads a run's weights [1, BD] of w [n, D]."""
    column = tl.arange(0, BD)
    return tl.load(w + run * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
@no_type_check
def over_rms(x, eps, D: tl.constexpr):
    """1 / (mean(x^2) + eps)^(1/2) of each row, [BR, 1]."""
    return tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def norm_kernel(
    x, branch, w, gate, y, total, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Adds, normalizes and gates one tile of one run."""
    i, run = tl.program_id(0), tl.program_id(1)
    out = load(x, run, i, rows, D, BD, BR)
    if branch is not None:
        # Round as the stored sum is rounded, which the backward reads.
        out = (out + load(branch, run, i, rows, D, BD, BR)).to(total.dtype.element_ty).to(tl.float32)
        store(total, out, run, i, rows, D, BD, BR)
    if w is not None:
        out *= over_rms(out, eps, D) * weights(w, run, D, BD)
    if gate is not None:
        out *= tl.sigmoid(load(gate, run, i, rows, D, BD, BR))
    store(y, out, run, i, rows, D, BD, BR)


@triton.jit(do_not_specialize=["rows"])
@no_type_check
def norm_backward_kernel(
    x, w, gate, d_y, d_total, d_x, d_branch, d_w, d_gate, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The backward of `norm_kernel`, where x is the input of the norm.

    A program takes every m-th tile of a run, where m is the number of programs, and fills one row of d_w [n, m, D].
    """
    run = tl.program_id(1)
    sums = tl.zeros([BR, BD], dtype=tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(rows, BR), tl.num_programs(0)):
        d_out = load(d_y, run, i, rows, D, BD, BR)
        normed = load(x, run, i, rows, D, BD, BR)
        if w is not None:
            inverse_rms = over_rms(normed, eps, D)
            normed *= inverse_rms
            weight = weights(w, run, D, BD)
        if gate is not None:
            gate_sigmoid = tl.sigmoid(load(gate, run, i, rows, D, BD, BR))
            ungated = normed * weight if w is not None else normed
            store(d_gate, d_out * ungated * gate_sigmoid * (1 - gate_sigmoid), run, i, rows, D, BD, BR)
            d_out *= gate_sigmoid
        if w is not None:
            sums += d_out * normed
            d_out *= weight
            d_out = inverse_rms * (d_out - normed * (tl.sum(d_out * normed, 1) / D)[:, None])
        if d_total is not None:
            d_out += load(d_total, run, i, rows, D, BD, BR)
        store(d_x, d_out, run, i, rows, D, BD, BR)
        if d_branch is not None:
            store(d_branch, d_out, run, i, rows, D, BD, BR)
    if w is not None:
        column = tl.arange(0, BD)
        at = d_w + (run * tl.num_programs(0) + tl.program_id(0)) * D + column
        tl.store(at, tl.sum(sums, 0), mask=column < D)


def _sizes(x: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and warps for rows of x [n, R, D]."""
    width = triton.next_power_of_2(x.shape[-1])
    sizes = {"rows": x.shape[1], "D": x.shape[2], "BD": width, "BR": max(1, TILE // width)}
    return sizes, {"num_warps": min(16, max(4, width // 512))}


def _contiguous(x: Tensor | None) -> Tensor | None:
    """The tensor, contiguous."""
    return None if x is None else x.contiguous()


@torch.library.custom_op("deltalab::rms_norm", mutates_args=())
def rms_norm(
    x: Tensor, branch: Tensor | None, w: Tensor | None, gate: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Computes y = w z / (mean(z^2) + eps)^(1/2) * sigmoid(gate) and z = x + branch, of n runs, in fp32.

    Args:
        x: [n, R, D] in bf16, fp16 or fp32, like all tensors.
        branch: [n, R, D]; without it, z is x.
        w: [n, D]; without it, nothing is normalized.
        gate: [n, R, D]; without it, y is not gated.
        eps: Added to the mean of squares.
        dtype: The dtype of y.

    Returns:
        y and z; [n, 0] in place of z if there is no branch.
    """
    y, total = outputs = _outputs(x=x, branch=branch, dtype=dtype)
    sizes, resources = _sizes(x)
    operands = {
        "x": x.contiguous(), "branch": _contiguous(branch), "w": _contiguous(w), "gate": _contiguous(gate),
        "y": y, "total": total, "eps": eps,
    }  # fmt: skip
    launch(norm_kernel, (triton.cdiv(x.shape[1], sizes["BR"]), x.shape[0]), operands, sizes, **resources)
    return outputs


def _outputs(*, x: Tensor, branch: Tensor | None, dtype: torch.dtype, **_: Any) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=dtype)
    if branch is None:
        return y, absent(x)
    return y, x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, branch.dtype))


@torch.library.custom_op("deltalab::rms_norm_backward", mutates_args=())
def _backward(
    z: Tensor,
    w: Tensor | None,
    gate: Tensor | None,
    d_y: Tensor | None,
    d_total: Tensor | None,
    eps: float,
    x_dtype: torch.dtype,
    branch_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Gradients of x, of w in fp32, of the gate, and of the branch if its dtype is not that of x.

    z is that of `rms_norm`, and `branch_dtype` is None if there is no branch.
    """
    d_y = torch.zeros_like(z) if d_y is None else d_y.contiguous()
    sizes, resources = _sizes(z)
    programs = min(triton.cdiv(z.shape[1], sizes["BR"]), triton.cdiv(PROGRAMS, z.shape[0]))
    d_x, _, d_gate, d_branch = _gradients(z=z, w=w, gate=gate, x_dtype=x_dtype, branch_dtype=branch_dtype)
    d_w = None if w is None else z.new_empty(z.shape[0], programs, z.shape[2], dtype=torch.float32)
    operands = {
        "x": z.contiguous(), "w": _contiguous(w), "gate": _contiguous(gate), "d_y": d_y,
        "d_total": None if branch_dtype is None else _contiguous(d_total),
        "d_x": d_x, "d_branch": existing(d_branch), "d_w": d_w, "d_gate": existing(d_gate), "eps": eps,
    }  # fmt: skip
    launch(norm_backward_kernel, (programs, z.shape[0]), operands, sizes, **resources)
    return [d_x, absent(z) if d_w is None else d_w.sum(1), d_gate, d_branch]


def _gradients(
    *, z: Tensor, w: Tensor | None, gate: Tensor | None, x_dtype: torch.dtype, branch_dtype: torch.dtype | None,
    **_: Any,
) -> list[Tensor]:  # fmt: skip
    return [
        z.new_empty(z.shape, dtype=x_dtype),
        absent(z) if w is None else z.new_empty(w.shape, dtype=torch.float32),
        absent(z) if gate is None else gate.new_empty(gate.shape),
        absent(z) if branch_dtype in (None, x_dtype) else z.new_empty(z.shape, dtype=branch_dtype),
    ]


def _saved(arguments: ByName) -> ByName:
    x, branch = arguments["x"], arguments["branch"]
    return {
        "z": x if branch is None else arguments["total"],
        "x_dtype": x.dtype,
        "branch_dtype": None if branch is None else branch.dtype,
    }


def _arranged(gradients: Sequence[Tensor], arguments: ByName) -> Sequence[Tensor]:
    d_x, d_w, d_gate, d_branch = gradients
    return [d_x, d_x if arguments["branch_dtype"] == arguments["x_dtype"] else d_branch, d_w, d_gate]


register(_backward, shapes=_gradients)
register(
    rms_norm, shapes=_outputs, backward=_backward, outputs=["y", "total"], saved=_saved, arranged=_arranged
)  # fmt: skip
