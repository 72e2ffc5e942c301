"""Cross-entropy over a vocabulary at the labelled positions alone, without ever holding the logits of all of them."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.ops.backends import automatic

MOST_LOGITS = {"cpu": 2**18, "cuda": 2**28}
"""How many are held at a time: on a CPU what stays in its caches, on a GPU 0.5 GiB in bf16, gradients in place."""


def labelled(targets: Tensor, most: int, *, ignore: int) -> tuple[Tensor, Tensor]:
    """Of each row [.., T] the places of the first `most` targets that are not `ignore`, and these targets, [.., most].

    Rows with fewer are filled up with place 0 and `ignore`: shapes do not depend on the data, so that they can be part
    of a CUDA graph.

    >>> labelled(torch.tensor([[-1, 7, -1, 8], [-1, -1, -1, 9]]), 2, ignore=-1)
    (tensor([[1, 3],
            [3, 0]]), tensor([[ 7,  8],
            [ 9, -1]]))
    """
    scored = targets != ignore
    column = torch.where(scored, scored.cumsum(-1) - 1, most).clamp(max=most)
    place = torch.arange(targets.shape[-1], device=targets.device).expand_as(targets)
    at = torch.zeros_like(targets[..., :1]).expand(*targets.shape[:-1], most + 1).scatter(-1, column, place)
    wanted = torch.full_like(at, ignore).scatter(-1, column, targets)
    return at[..., :most], wanted[..., :most]


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, ignore: int) -> Tensor:
    """-log softmax(W x_i)[y_i] in the mean over all i with y_i != `ignore`, for each of n models: [n], fp32.

    x [n, M, d], weight W [n, V, d], in the dtype that products are in; targets y [n, M] in [0, V). No y that counts is
    no loss: 0 / 0. The gradient is that of the logits' softmax in fp32, rounded to the dtype of x for the products.
    """
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, ignore)  # type: ignore[no-untyped-call]
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, while a chunk's logits are there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, ignore: int) -> Tensor:
        models, positions, _ = x.shape
        kernel = automatic(x.device.type).cross_entropy
        # Whole models before parts of them: a model's sums are then the same, however many there are.
        most = max(1, MOST_LOGITS[x.device.type] // weight.shape[1])
        together, size = max(1, most // positions), min(most, positions)
        counted = targets != ignore
        count = counted.sum(1)
        total = x.new_zeros(models, dtype=torch.promote_types(x.dtype, torch.float32))
        d_x, d_weights = torch.empty_like(x), []
        for of in (slice(first, first + together) for first in range(0, models, together)):
            d_weight = None
            for begin in range(0, positions, size):
                at = of, slice(begin, begin + size)
                logits = x[at] @ weight[of].mT
                if kernel is not None:
                    total[of] += kernel(logits, targets[at], count[of], ignore=ignore).sum(1)
                    d_logits = logits
                else:
                    loss, d_logits = _cross_entropy(logits.to(total.dtype), targets[at], counted[at], count[of])
                    total[of] += loss
                    d_logits = d_logits.to(x.dtype)
                d_x[at] = d_logits @ weight[of]
                added = d_logits.mT @ x[at]
                # Sums of many chunks are taken in fp32.
                d_weight = added if d_weight is None else d_weight.to(total.dtype) + added
            assert d_weight is not None
            d_weights.append(d_weight.to(weight.dtype))
        ctx.save_for_backward(d_x, torch.cat(d_weights) if len(d_weights) > 1 else d_weights[0])
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_x, d_weight = ctx.saved_tensors
        # In one pass each, and in the precision of d_loss.
        d_x, d_weight = (torch.mul(one, d_loss[:, None, None], out=torch.empty_like(one)) for one in (d_x, d_weight))
        return d_x, d_weight, None, None


def _cross_entropy(logits: Tensor, targets: Tensor, counted: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Of each model, the sum over positions that count [n] and the gradient of its mean [n, M, V], in place."""
    wanted = targets[..., None].clamp(min=0)
    right, top = logits.gather(-1, wanted), logits.amax(-1, keepdim=True)
    # One exponential of each logit: log_softmax, and then its exponential, are two.
    weights = logits.sub_(top).exp_()
    mass = weights.sum(-1, keepdim=True)
    loss = torch.where(counted, (mass.log() + top - right)[..., 0], 0).sum(1)
    share = (counted.to(mass.dtype) / count[:, None])[..., None]
    return loss, weights.mul_(share / mass).scatter_add_(-1, wanted, -share)
