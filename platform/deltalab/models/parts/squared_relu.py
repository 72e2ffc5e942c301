"""The MLP of squared ReLU, in place of SwiGLU."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.models.start import linear


def squared_relu_width(d_model: int, *, gated: bool) -> int:
    """Returns the default hidden width of `SquaredReLU`: 4 d, and 7/2 d with a gate, rounded up to a multiple of 8."""
    return -(-(7 if gated else 8) * d_model // 16) * 8


class SquaredReLU(nn.Module):
    """An MLP, W_2 relu(W_1 x)^2; with a gate, sigmoid(W_g x') * W_2 relu(W_1 x)^2.

    Args:
        d_model: The width of x.
        hidden: The width of W_1 x; None for `squared_relu_width`.
        gated: Whether there is a gate.
        out_std: The standard deviation at which W_2 starts.

    References:
        So et al. 2021 (Primer), arXiv:2109.08668; with the gate, Peng et al. 2023 (RWKV), arXiv:2305.13048.
    """

    def __init__(self, d_model: int, *, hidden: int | None = None, gated: bool = False, out_std: float) -> None:
        super().__init__()
        self.hidden = hidden or squared_relu_width(d_model, gated=gated)
        self.into = linear(d_model, self.hidden)
        self.gate = linear(d_model, d_model) if gated else None
        self.out = linear(self.hidden, d_model, std=out_std)

    def forward(self, x: Tensor, gate: Tensor, canon: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Computes the MLP of x [..., d], with a canon layer on W_1 x if there is one. `gate` is x', what W_g reads."""
        hidden = self.into(x) if canon is None else canon(self.into(x))
        out: Tensor = self.out(F.relu(hidden).square())
        return out if self.gate is None else self.gate(gate).sigmoid() * out
