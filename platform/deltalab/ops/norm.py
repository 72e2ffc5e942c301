"""RMS norms with the residual addition before or the gate after them: one kernel, or PyTorch's operators."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.ops.backends import automatic

EPS = 1e-5


class RMSNorm(nn.RMSNorm):
    """w x / (mean(x^2) + 1e-5)^(1/2) for x [.., d]; w [d] starts at 1."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)

    def forward(self, x: Tensor) -> Tensor:
        found = _fused(x, None, self.weight, None)
        return super().forward(x) if found is None else found[0].view(x.shape)


class ResidualNorm(nn.RMSNorm):
    """x + branch, or x where branch is None, and `RMSNorm` of the sum."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=EPS)

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        found = _fused(x, branch, self.weight, None)
        if found is None:
            x = x if branch is None else x + branch
            return x, super().forward(x)
        y, total = found
        return x if branch is None else total.view(x.shape), y.view(x.shape)


class HeadNorm(nn.Module):
    """`RMSNorm` of each head of o [.., H, V], times sigmoid(gate) for gate [.., H V]: [.., H V].

    w is [V]. Without `norm` only the gate applies; without a gate only the norm.
    """

    weight: nn.Parameter | None

    def __init__(self, width: int, *, norm: bool = True) -> None:
        super().__init__()
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if norm else None)

    def forward(self, o: Tensor, gate: Tensor | None) -> Tensor:
        found = None if self.weight is None and gate is None else _fused(o, None, self.weight, gate)
        if found is not None:
            return found[0].view(o.shape).flatten(-2)
        if self.weight is not None:
            o = F.rms_norm(o, self.weight.shape, self.weight, EPS)
        o = o.flatten(-2)
        return o if gate is None else o * gate.sigmoid()


def _fused(
    x: Tensor, branch: Tensor | None, weight: Tensor | None, gate: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """The kernel's norm and sum, in the dtype of the next product; None where no kernel takes x."""
    device, rows = x.device.type, (1, -1, x.shape[-1])
    rms_norm = automatic(device).rms_norm
    if rms_norm is None or x.dtype == torch.float64:
        return None
    return rms_norm(
        x.reshape(rows),
        None if branch is None else branch.reshape(rows),
        None if weight is None else weight[None],
        None if gate is None else gate.reshape(rows),
        EPS,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype,
    )
