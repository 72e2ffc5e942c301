"""Cross-entropy over a vocabulary at the labelled positions alone, without ever holding the logits of all of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.machine import may_launch

MOST_LOGITS = {"cpu": 2**20, "cuda": 2**28}
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
        size = max(1, MOST_LOGITS[x.device.type] // (models * weight.shape[1]))
        counted = targets != ignore
        count = counted.sum(1)
        total = x.new_zeros(models, dtype=torch.promote_types(x.dtype, torch.float32))
        d_x, d_weight = torch.empty_like(x), None
        for begin in range(0, positions, size):
            part = slice(begin, begin + size)
            logits = x[:, part] @ weight.mT
            if may_launch(x.device.type):
                from deltalab.kernels.loss import cross_entropy_

                total += cross_entropy_(logits, targets[:, part], count, ignore=ignore).sum(1)
                d_logits = logits
            else:
                wanted = targets[:, part, None].clamp(min=0)
                logs = F.log_softmax(logits, -1, dtype=total.dtype)
                total -= torch.where(counted[:, part], logs.gather(-1, wanted)[..., 0], 0).sum(1)
                share = (counted[:, part].to(total.dtype) / count[:, None])[..., None]
                d_logits = logs.exp_().scatter_add_(-1, wanted, torch.full_like(share, -1)).mul_(share).to(x.dtype)
            d_x[:, part] = d_logits @ weight
            added = d_logits.mT @ x[:, part]
            # Sums of many chunks are taken in fp32.
            d_weight = added if d_weight is None else d_weight.to(total.dtype) + added
        assert d_weight is not None
        ctx.save_for_backward(d_x, d_weight.to(weight.dtype))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_x, d_weight = ctx.saved_tensors
        # In one pass each, and in the precision of d_loss.
        d_x, d_weight = (torch.mul(one, d_loss[:, None, None], out=torch.empty_like(one)) for one in (d_x, d_weight))
        return d_x, d_weight, None, None
