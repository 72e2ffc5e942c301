"""Cross-entropy over a vocabulary, chunk by chunk: the logits of all positions are never held at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.ops.backends import automatic

MOST_LOGITS = {"cpu": 2**18, "cuda": 2**28}
"""Logits held at a time: as many as a CPU's caches hold; on a GPU 0.5 GiB in bf16, where gradients replace them."""


def labelled(targets: Tensor, most: int, *, ignore: int) -> tuple[Tensor, Tensor]:
    """The places of each row's first `most` targets that are not `ignore`, and these targets, both [.., most].

    Rows with fewer targets are filled up with place 0 and target `ignore`. Shapes do not depend on the data, as a CUDA
    graph requires.

    Args:
        targets: [.., T].
        most: The number of places.
        ignore: The target of places that do not count.

    Examples:
        >>> labelled(torch.tensor([[-1, 7, -1, 8], [-1, -1, -1, 9]]), 2, ignore=-1)
        (tensor([[1, 3],
                [3, 0]]), tensor([[ 7,  8],
                [ 9, -1]]))
    """
    scored = targets != ignore
    column = torch.where(scored, scored.cumsum(-1) - 1, most).clamp(max=most)
    place = torch.arange(targets.shape[-1], device=targets.device).expand_as(targets)
    places = torch.zeros_like(targets[..., :1]).expand(*targets.shape[:-1], most + 1).scatter(-1, column, place)
    wanted = torch.full_like(places, ignore).scatter(-1, column, targets)
    return places[..., :most], wanted[..., :most]


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Computes cap tanh(logits / cap), which is below `cap`; the logits themselves if `cap` is None (Gemma 2)."""
    return logits if cap is None else cap * (logits / cap).tanh()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore: int = -100,
    count: Tensor | int | None = None,
    cap: float | None = None,
    z: float = 0.0,
) -> Tensor:
    """Computes the mean of -log softmax(l_i)[y_i] + z (log sum exp l_i)^2 over all i with y_i != `ignore`.

    The logits l_i are `capped` W x_i. The sums are in at least fp32.

    If x, weight and targets have one more leading dimension n, computes the mean of each of n models, [n]. The gradient
    of the logits is computed in fp32, and rounded to the dtype of x before it is multiplied.

    Args:
        x: [M, d] in the dtype of the products.
        weight: W, [V, d] in the dtype of the products.
        targets: y in [0, V), [M].
        ignore: The target of positions that are left out of the mean.
        count: The number that divides the sum, for a batch that is a part of a larger batch. By default the number of
            targets other than `ignore`; the result is NaN if all targets are `ignore`.
        cap: The bound of the logits; None for none. With it, and with z, a GPU computes without a kernel of ours.
        z: The weight of the square of the logarithm of softmax's denominator (PaLM's z-loss has 1e-4).
    """
    if x.dim() == 2:
        rows = x[None], weight[None], targets[None]
        return linear_cross_entropy(*rows, ignore=ignore, count=count, cap=cap, z=z).sum()
    if count is None:
        number = (targets != ignore).sum(1)
    elif isinstance(count, Tensor):
        number = count.to(x.device).expand(len(x)).contiguous()
    else:
        number = torch.full((len(x),), count, device=x.device)
    differentiate = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    how = (ignore, cap, z, differentiate)
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, number, *how)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The forward computes the gradients too, while it holds a chunk's logits, unless `differentiate` is False."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        count: Tensor,
        ignore: int,
        cap: float | None,
        z: float,
        differentiate: bool,
    ) -> Tensor:
        models, positions, _ = x.shape
        kernel = None if cap or z else automatic(x.device.type).cross_entropy
        # Chunks hold whole models where they can, so that a model's sums do not depend on how many train together.
        most = max(1, MOST_LOGITS[x.device.type] // weight.shape[1])
        together, size = max(1, most // positions), min(most, positions)
        counted = targets != ignore
        total = x.new_zeros(models, dtype=torch.promote_types(x.dtype, torch.float32))
        d_x, d_weights = torch.empty_like(x) if differentiate else x, []
        for models_at in (slice(first, first + together) for first in range(0, models, together)):
            d_weight = None
            for begin in range(0, positions, size):
                block = models_at, slice(begin, begin + size)
                logits = x[block] @ weight[models_at].mT
                if kernel is not None:
                    total[models_at] += kernel(logits, targets[block], count[models_at], ignore=ignore).sum(1)
                    d_logits = logits
                else:
                    logits = capped(logits.to(total.dtype), cap)
                    slope = None if cap is None else 1 - (logits / cap).square()
                    loss, d_logits = _cross_entropy(logits, targets[block], counted[block], count[models_at], z)
                    total[models_at] += loss
                    d_logits = (d_logits if slope is None else d_logits.mul_(slope)).to(x.dtype)
                if not differentiate:
                    continue
                d_x[block] = d_logits @ weight[models_at]
                added = d_logits.mT @ x[block]
                # Add up chunks in fp32.
                d_weight = added if d_weight is None else d_weight.to(total.dtype) + added
            if d_weight is not None:
                d_weights.append(d_weight.to(weight.dtype))
        if differentiate:
            ctx.save_for_backward(d_x, torch.cat(d_weights) if len(d_weights) > 1 else d_weights[0])
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = ctx.saved_tensors
        # One pass for each, which multiplies in the precision of d_loss.
        d_x, d_weight = (torch.mul(d, d_loss[:, None, None], out=torch.empty_like(d)) for d in (d_x, d_weight))
        return d_x, d_weight, *([None] * 6)


def _cross_entropy(logits: Tensor, targets: Tensor, counted: Tensor, count: Tensor, z: float) -> tuple[Tensor, Tensor]:
    """Each model's loss summed over the positions that count, [n], and the gradient of its mean [n, M, V].

    The gradient takes the place of the logits.
    """
    wanted = targets[..., None].clamp(min=0)
    right, top = logits.gather(-1, wanted), logits.amax(-1, keepdim=True)
    # This takes one exponential of each logit; log_softmax and its exponential would take two.
    weights = logits.sub_(top).exp_()
    mass = weights.sum(-1, keepdim=True)
    denominator = mass.log() + top
    each = denominator - right
    share = (counted.to(mass.dtype) / count[:, None])[..., None]
    scale = share / mass
    if z:
        each, scale = each + z * denominator.square(), scale * (1 + 2 * z * denominator)
    loss = torch.where(counted, each[..., 0], 0).sum(1)
    return loss, weights.mul_(scale).scatter_add_(-1, wanted, -share)
