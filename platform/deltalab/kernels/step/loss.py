"""Cross-entropy of rows of logits, and its gradient in their place: each row is read once and written once."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDEST = 8192
"""The most logits that a program holds at once. Wider rows are read twice."""


@triton.jit(do_not_specialize=["rows", "every", "apart"])
@no_type_check
def row_kernel(
    logits, targets, count, losses, rows, every, apart,
    IGNORE: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """A program for each row. If a block holds the row, each loop runs once, and the compiler loads the row once."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    run = row // rows
    target = tl.load(targets + run * every + row % rows * apart)
    logits += row.to(tl.int64) * V
    if target == IGNORE:
        for begin in range(0, V, BLOCK):
            tl.store(logits + begin + i, tl.zeros([BLOCK], logits.dtype.element_ty), mask=begin + i < V)
        tl.store(losses + row, 0.0)
    else:
        wanted = tl.load(logits + target).to(KIND)
        share = 1.0 / tl.load(count + run).to(KIND)
        # Begin with a finite number: -inf would make NaN of a block that is all -inf.
        top, total = tl.full([], -3e38, KIND), tl.zeros([], KIND)
        for begin in range(0, V, BLOCK):
            x = tl.load(logits + begin + i, mask=begin + i < V, other=float("-inf")).to(KIND)
            higher = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
            top = higher
        scale = share / total
        for begin in range(0, V, BLOCK):
            x = tl.load(logits + begin + i, mask=begin + i < V, other=float("-inf")).to(KIND)
            d_x = tl.exp(x - top) * scale - tl.where(begin + i == target, share, 0.0)
            tl.store(logits + begin + i, d_x.to(logits.dtype.element_ty), mask=begin + i < V)
        tl.store(losses + row, top - wanted + tl.log(total))


def cross_entropy_(logits: Tensor, targets: Tensor, count: Tensor, *, ignore: int) -> Tensor:
    """-log softmax(z_i)[y_i] for logits z [n, m, V] and targets y [n, m] in [0, V), at least fp32: [n, m].

    Overwrites z with (softmax(z_i) - onehot(y_i)) / count, the gradient of the sum over `count` [n], in the dtype of z.
    Loss and gradient are 0 where y_i is `ignore`. y may be strided, as it is if a sequence has one label.
    """
    runs, rows, width = logits.shape
    wide = logits.dtype == torch.float64
    losses = logits.new_empty(runs, rows, dtype=torch.float64 if wide else torch.float32)
    block = min(triton.next_power_of_2(width), WIDEST)
    every, apart = targets.stride()
    row_kernel[(runs * rows,)](
        logits=logits, targets=targets, count=count, losses=losses, rows=rows, every=every, apart=apart,
        IGNORE=ignore, V=width, BLOCK=block, KIND=tl.float64 if wide else tl.float32,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return losses
