"""A step of AdamW with clipping for many runs, in two launches. It reads the gradient twice and all else once."""

from typing import no_type_check

import triton
import triton.language as tl
from torch import Tensor

PARTS = 256
"""Programs that sum the squares of a run's gradient, each in a fixed order."""

BLOCK = 1024
"""Weights that a program updates."""


@triton.jit
@no_type_check
def squares_kernel(grad, squares, width, BLOCK: tl.constexpr):
    """Sums the squares of one part of a run's gradient."""
    part, parts, run = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    grad += run.to(tl.int64) * width
    sums = tl.zeros([BLOCK], tl.float32)
    for begin in range(part * BLOCK, width, parts * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(grad + i, mask=i < width, other=0.0)
        sums += x * x
    tl.store(squares + run * parts + part, tl.sum(sums, 0))


@triton.jit(do_not_specialize=["runs"])
@no_type_check
def adamw_kernel(
    weights, exp_avg, exp_avg_sq, grad, losses, squares, bad, loss, begin, row, rates, betas, new, clip, eps,
    width, decayed, scaled, share, runs, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Updates one block of a run's weights. Each program finds out whether the run's loss and gradient are finite."""
    run, rates_row = tl.program_id(1), tl.load(row)
    norm = tl.sqrt(tl.sum(tl.load(squares + run * PARTS + tl.arange(0, PARTS)), 0))
    bad_step, new_loss = tl.load(bad + run), tl.load(losses + run)
    fine = (bad_step < 0) & (tl.abs(new_loss) < float("inf")) & (norm < float("inf"))
    if tl.program_id(0) == 0:
        tl.store(loss + run, new_loss)
        # A program that reads this step instead of -1 would have found the run bad anyway.
        tl.store(bad + run, tl.load(begin) + rates_row, mask=(bad_step < 0) & (fine == 0))
    rates += rates_row * 3 * runs + run
    decay, rate, root = tl.load(rates), tl.load(rates + runs), tl.load(rates + 2 * runs)
    scale = tl.minimum(tl.load(clip + run) / (norm + 1e-6), 1.0)

    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < width
    at = run.to(tl.int64) * width + i
    g = tl.where(fine, tl.load(grad + at, mask=mask, other=0.0) * scale, 0.0)
    m = tl.load(exp_avg + at, mask=mask, other=0.0) * tl.load(betas + run) + g * tl.load(new + run)
    v = tl.load(exp_avg_sq + at, mask=mask, other=0.0) * tl.load(betas + runs + run) + g * g * tl.load(new + runs + run)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)
    w = tl.load(weights + at, mask=mask & fine, other=0.0)
    rate = tl.where(i < scaled, rate * share, rate)
    w = tl.where(i < decayed, w * (1 - decay), w) - m / (tl.sqrt(v) / root + eps) * rate
    tl.store(weights + at, w, mask=mask & fine)


def adamw_(
    weights: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    losses: Tensor,
    *,
    bad: Tensor,
    loss: Tensor,
    begin: Tensor,
    row: Tensor,
    rates: Tensor,
    betas: Tensor,
    new: Tensor,
    clip: Tensor,
    eps: float,
    decayed: int,
    scaled: int,
    share: float,
) -> None:
    """Updates the weights and moments of n runs in place by a gradient, all in fp32.

        g = min(1, clip / (|grad| + 1e-6)) grad, m += (1 - beta_1) (g - m), v += (1 - beta_2) (g^2 - v),
        w <- (1 - decay) w - rate m / (v^(1/2) / root + eps).

    A run whose loss or |grad| is not finite has a gradient of 0 from then on, and its weights stay as they are.

    Args:
        weights: w, [n, P].
        exp_avg: m, [n, P].
        exp_avg_sq: v, [n, P].
        grad: [n, P].
        losses: The loss of each run at this step, [n].
        bad: The first step at which a run's loss or |grad| was not finite, or -1, [n].
        loss: Receives `losses`, [n].
        begin: The number of the step whose rates are row 0 of `rates`, 0-dim in int64.
        row: The row of `rates`, 0-dim in int64.
        rates: decay, rate and root of each step, [.., 3, n, 1].
        betas: beta_1 and beta_2, [2, n, 1].
        new: 1 - betas, [2, n, 1].
        clip: [n].
        eps: Added to the divisor.
        decayed: How many weights of a run decay, counted from the first one.
        scaled: How many weights of a run have `share` times the rate, counted from the first one.
        share: The factor of the rate of the first `scaled` weights.
    """
    runs, width = weights.shape
    squares = grad.new_empty(runs, PARTS)
    squares_kernel[(PARTS, runs)](grad=grad, squares=squares, width=width, BLOCK=BLOCK)
    adamw_kernel[(triton.cdiv(width, BLOCK), runs)](
        weights=weights, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, grad=grad, losses=losses, squares=squares, bad=bad,
        loss=loss, begin=begin, row=row, rates=rates, betas=betas, new=new, clip=clip, eps=eps,
        width=width, decayed=decayed, scaled=scaled, share=share, runs=runs, PARTS=PARTS, BLOCK=BLOCK,
    )  # fmt: skip
