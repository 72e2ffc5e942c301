"""A mixture of experts in place of a block's MLP."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.errors import InputError, unknown
from deltalab.models.settings.limits import whole
from deltalab.models.start import Matrices, linear

EXPERTS: dict[str, Any] = {"count": 8, "top": 2, "shared": 1, "width": None, "balance": 0.01}
"""The keys of `ModelSpec.experts`, with their defaults."""


class Experts(nn.Module):
    """A mixture of experts, y = MLP_shared(x) + sum_{e in S} w_e MLP_e(x), where S has the `top` largest of p_e.

    p = softmax(W_r x) over all `count` experts, in at least fp32, and w_e = p_e / sum_{i in S} p_i sums to 1 over S.
    Each MLP is a SwiGLU. The shared experts, which read every token, are one MLP: SwiGLUs of width h that are summed
    are one SwiGLU, whose width is the sum of theirs.

    No token is dropped, and no token changes what another gets. All experts are computed on all tokens, and those
    outside of S have weight 0. So time and memory grow with `count`, although a token uses `top` experts.

    Args:
        d_model: The width of x.
        count: The number E of routed experts.
        top: The experts that a token uses. With 1, w would be 1 and W_r would learn nothing.
        hidden: The hidden width h of each expert.
        shared: The shared experts as one MLP; None for none.
        out_std: The standard deviation at which the last matrix of each expert starts.
        balance: The weight of the balance loss; 0 for none.

    References:
        Dai et al. 2024 (DeepSeekMoE), arXiv:2401.06066, for shared and small experts. Jiang et al. 2024 (Mixtral),
        arXiv:2401.04088, for weights that sum to 1. Fedus et al. 2021 (Switch), arXiv:2101.03961, for the balance loss.
    """

    def __init__(
        self,
        d_model: int,
        count: int,
        top: int,
        *,
        hidden: int,
        shared: nn.Module | None,
        out_std: float,
        balance: float,
    ) -> None:
        super().__init__()
        self.top, self.balance = top, balance
        self.router = linear(d_model, count)
        self.into = Matrices(count, d_model, 2 * hidden, d_model**-0.5)
        self.out = Matrices(count, hidden, d_model, out_std)
        self.shared = shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes y, and the balance loss in training, b E sum_e f_e P_e.

        f_e is the share of choices that went to expert e, which has no gradient, and P_e the mean of p_e, over the
        tokens of this call. With even choices the loss is b, whatever `top` is.

        Args:
            x: [..., d].

        Returns:
            y [..., d], and the loss []; None outside of training, and with a `balance` of 0.
        """
        tokens = x.flatten(0, -2)
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # there is none on `meta`
            shares = F.linear(tokens.to(wide), self.router.weight.to(wide)).softmax(-1)
        largest, chosen = shares.topk(self.top)
        weights = torch.zeros_like(shares).scatter(-1, chosen, largest / largest.sum(-1, keepdim=True))
        gate, up = self.into(tokens).chunk(2, dim=-1)
        hidden = F.silu(gate) * up
        y = self.out(hidden * weights.mT.unsqueeze(-1).to(hidden.dtype)).sum(0).view_as(x)
        if self.shared is not None:
            y = y + self.shared(x)
        if not self.balance or not self.training:
            return y, None
        even = torch.zeros_like(shares).scatter(-1, chosen, 1.0).mean(0) / self.top
        return y, self.balance * shares.shape[-1] * (even * shares.mean(0)).sum()

    @property
    def idle(self) -> int:
        """The parameters that a token does not use: those of the experts outside of S."""
        count = len(self.into.weight)
        return (self.into.weight.numel() + self.out.weight.numel()) // count * (count - self.top)


def idle_parameters(model: nn.Module) -> int:
    """Returns the number of parameters of experts that a token does not use."""
    return sum(part.idle for part in model.modules() if isinstance(part, Experts))


def experts_in_full(setting: object) -> dict[str, Any]:
    """Returns `ModelSpec.experts` with all its keys; raises `InputError` if it describes no mixture of experts."""
    if not isinstance(setting, Mapping):
        raise InputError(f"model.experts must be {{{', '.join(EXPERTS)}}}, or null, not {setting!r}")
    for key in setting:
        if key not in EXPERTS:
            raise unknown("key", key, EXPERTS, where="model.experts")
    given = {**EXPERTS, **setting}
    for name, least in (("count", 2), ("top", 2), ("shared", 0), ("width", 1)):
        if name != "width" or given[name] is not None:
            whole(f"experts.{name}", given[name], least=least)
    if given["top"] > given["count"]:
        raise InputError(f"model.experts.top must be at most count {given['count']}, not {given['top']}")
    balance = given["balance"]
    if isinstance(balance, bool) or not isinstance(balance, int | float) or not 0 <= balance <= 1:
        raise InputError(f"model.experts.balance must be a number from 0 to 1, not {balance!r}")
    return {**given, "balance": float(balance)}
