"""Cross-entropy of rows of logits, and its gradient in their place: each row is read once and written once."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 8192
"""The most logits that a program holds at once. Wider rows are read twice."""


@triton.jit(do_not_specialize=["rows", "run_stride", "target_stride"])
@no_type_check
def row_kernel(
    logits, targets, count, losses, rows, run_stride, target_stride,
    IGNORE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Computes one row. If a block holds the row, each loop runs once, and the compiler loads the row once."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    run = row // rows
    target = tl.load(targets + run * run_stride + row % rows * target_stride)
    logits += row.to(tl.int64) * V
    if target == IGNORE:
        for begin in range(0, V, BLOCK):
            tl.store(logits + begin + i, tl.zeros([BLOCK], logits.dtype.element_ty), mask=begin + i < V)
        tl.store(losses + row, 0.0)
    else:
        target_logit = tl.load(logits + target).to(DTYPE)
        share = 1.0 / tl.load(count + run).to(DTYPE)
        # Begin with a finite number: -inf would make NaN of a block that is all -inf.
        top, total = tl.full([], -3e38, DTYPE), tl.zeros([], DTYPE)
        for begin in range(0, V, BLOCK):
            x = tl.load(logits + begin + i, mask=begin + i < V, other=float("-inf")).to(DTYPE)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        scale = share / total
        for begin in range(0, V, BLOCK):
            x = tl.load(logits + begin + i, mask=begin + i < V, other=float("-inf")).to(DTYPE)
            d_x = tl.exp(x - top) * scale - tl.where(begin + i == target, share, 0.0)
            tl.store(logits + begin + i, d_x.to(logits.dtype.element_ty), mask=begin + i < V)
        tl.store(losses + row, top - target_logit + tl.log(total))


def cross_entropy_(logits: Tensor, targets: Tensor, count: Tensor, *, ignore: int) -> Tensor:
    """Computes -log softmax(z_i)[y_i], and puts its gradient in the place of the logits z.

    The gradient is that of the sum divided by `count`, (softmax(z_i) - onehot(y_i)) / count, in the dtype of z. Loss
    and gradient are 0 where y_i is `ignore`.

    Args:
        logits: z, [n, m, V].
        targets: y in [0, V), [n, m]. It may be strided, as it is if a sequence has one label.
        count: The number that divides each model's sum, [n].
        ignore: The target of positions that do not count.

    Returns:
        The losses [n, m] in at least fp32.
    """
    runs, rows, width = logits.shape
    fp64 = logits.dtype == torch.float64
    losses = logits.new_empty(runs, rows, dtype=torch.float64 if fp64 else torch.float32)
    block = min(triton.next_power_of_2(width), WIDEST)
    run_stride, target_stride = targets.stride()
    row_kernel[(runs * rows,)](
        logits=logits, targets=targets, count=count, losses=losses, rows=rows,
        run_stride=run_stride, target_stride=target_stride,
        IGNORE=ignore, V=width, BLOCK=block, DTYPE=tl.float64 if fp64 else tl.float32,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return losses
