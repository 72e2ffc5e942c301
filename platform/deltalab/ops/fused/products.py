"""Products of one tensor with several matrices."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from deltalab.ops.vmap import Stacked


def products(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Computes x W_i^T [B, T, C_i] for x [B, T, d] and each W_i [C_i, d], in autocast's dtype if autocast is enabled.

    The gradient of x is summed in x's dtype, while the products that make the gradient are computed.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weights = x.to(dtype), tuple(weight.to(dtype) for weight in weights)
    outputs = _Products.apply(x.flatten(0, 1), *weights)  # type: ignore[no-untyped-call]
    return tuple(output.unflatten(0, x.shape[:2]) for output in outputs)


class _Products(Stacked):
    """The products x W_i^T for x [.., M, d] and each W_i [.., C_i, d]."""

    @staticmethod
    def forward(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(x @ weight.mT for weight in weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        d_x: Tensor | None = None
        if ctx.needs_input_grad[0]:
            for grad, weight in zip(grads, weights, strict=True):
                if d_x is None:
                    d_x = grad @ weight
                else:
                    d_x = d_x.addmm_(grad, weight) if x.dim() == 2 else d_x.baddbmm_(grad, weight)
        needed = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return d_x, *(grad.mT @ x if is_needed else None for grad, is_needed in needed)
