"""Norms with the residual addition before or the gate after them. Those of RMS have a kernel beside PyTorch's code."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.ops.backends import automatic

EPS = 1e-5
"""Added to a mean of squares."""

HEAD_NORMS = ("none", "rms", "rms_unweighted", "rms_all", "rms_all_of_silu", "layer", "layer_all", "group")
OVER_ALL = ("rms_all", "rms_all_of_silu", "layer_all")
HEAD_GATES = ("none", "sigmoid", "silu", "linear", "sigmoid_before_norm", "silu_before_norm")
"""The norms and the gates of `HeadNorm`."""


class RMSNorm(nn.RMSNorm):
    """The norm w x / (mean(x^2) + eps)^(1/2) of x [.., d], where w [d] starts at 1."""

    eps: float

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """The norm of x."""
        fused = _fused(x, None, self.weight, None, self.eps)
        return super().forward(x) if fused is None else fused[0].view(x.shape)


class ResidualNorm(nn.RMSNorm):
    """The sum x + branch, or x if branch is None, and `RMSNorm` of the sum."""

    eps: float

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The sum, and its norm."""
        fused = _fused(x, branch, self.weight, None, self.eps)
        if fused is None:
            x = x if branch is None else x + branch
            return x, super().forward(x)
        y, total = fused
        return x if branch is None else total.view(x.shape), y.view(x.shape)


class ResidualLayerNorm(nn.LayerNorm):
    """The sum x + branch, or x if branch is None, and w (y - mean(y)) / (var(y) + eps)^(1/2) + b of the sum y.

    w [d] starts at 1 and b [d] at 0.
    """

    def __init__(self, width: int, eps: float = EPS) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The sum, and its norm."""
        x = x if branch is None else x + branch
        return x, super().forward(x)


class HeadNorm(nn.Module):
    """The norm and gate of o [.., H, V], [.., H V], with the gate's input z [.., H V] or None.

    Args:
        width: V.
        heads: H.
        norm: The norm of each head, where w starts at 1 and b at 0. `rms` (or True) is w o / (mean(o^2) + eps)^(1/2)
            with w [V], and `rms_unweighted` has no w. `rms_all` takes the mean over the channels of all heads, with
            w [H V], and `rms_all_of_silu` is the same norm of SiLU(o). `layer` is
            w (o - mean(o)) / (var(o) + eps)^(1/2) + b with w and b [V], `group` is the same with w and b [H V], and
            `layer_all` is `group` with mean and variance over the channels of all heads.
            `none` (or False) is no norm.
        gate: `sigmoid` (or True) is norm(o) sigmoid(z), `silu` is norm(o) z sigmoid(z), and `linear` is norm(o) z. A
            gate whose name ends in `before_norm` comes before the norm. `none` (or False) is no gate.
        eps: Added to the mean or variance.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, width: int, *, heads: int = 1, norm: bool | str = True, gate: bool | str = True, eps: float = EPS
    ) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.kind = _kind(norm, "rms")
        kind = _kind(gate, "sigmoid")
        self.gate_first = kind.endswith("before_norm")
        activations: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "linear": nn.Identity()}
        self.activation = activations.get(kind.removesuffix("_before_norm"), torch.sigmoid)
        self.has_kernel = self.kind in ("rms", "none") and kind in ("sigmoid", "none")
        channels = heads * width if self.kind in (*OVER_ALL, "group") else width
        weighted, biased = self.kind not in ("none", "rms_unweighted"), self.kind in ("layer", "layer_all", "group")
        self.register_parameter("weight", nn.Parameter(torch.empty(channels)) if weighted else None)
        self.register_parameter("bias", nn.Parameter(torch.empty(channels)) if biased else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts the weights at 1 and the biases at 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, o: Tensor, gate: Tensor | None, bonus: Tensor | None = None) -> Tensor:
        """The gated norm of o [.., H, V], for the gate's input [.., H V], with a bonus [.., H, V] added to the norm."""
        idle = self.weight is None and gate is None
        kernel = self.has_kernel and bonus is None and not idle
        fused = _fused(o, None, self.weight, gate, self.eps) if kernel else None
        if fused is not None:
            return fused[0].view(o.shape).flatten(-2)
        factor = None if gate is None else self.activation(gate)
        if factor is not None and self.gate_first:
            o, factor = o * factor.view(o.shape), None
        normed = self._normed(o)
        normed = (normed if bonus is None else normed + bonus).flatten(-2)
        return normed if factor is None else normed * factor

    def _normed(self, o: Tensor) -> Tensor:
        """The norm of o."""
        shape = (self.width,)
        if self.kind == "none":
            return o
        if self.kind in ("rms", "rms_unweighted"):
            return F.rms_norm(o, shape, self.weight, self.eps)
        if self.kind == "layer":
            return F.layer_norm(o, shape, self.weight, self.bias, self.eps)
        assert self.weight is not None
        if self.kind == "layer_all":
            return F.layer_norm(o.flatten(-2), self.weight.shape, self.weight, self.bias, self.eps).view(o.shape)
        if self.kind in OVER_ALL:
            o = F.silu(o) if self.kind == "rms_all_of_silu" else o
            return F.rms_norm(o.flatten(-2), self.weight.shape, self.weight, self.eps).view(o.shape)
        assert self.bias is not None
        return F.layer_norm(o, shape, eps=self.eps) * self.weight.view(-1, self.width) + self.bias.view(-1, self.width)


def _kind(choice: bool | str, default: str) -> str:
    """The name of a norm or gate; `default` for True, and `none` for False."""
    return choice if isinstance(choice, str) else default if choice else "none"


def _fused(
    x: Tensor, branch: Tensor | None, weight: Tensor | None, gate: Tensor | None, eps: float
) -> tuple[Tensor, Tensor] | None:
    """The kernel's norm and sum, in the dtype of the next product; None if no kernel takes x."""
    device, rows = x.device.type, (1, -1, x.shape[-1])
    rms_norm = automatic(device).rms_norm
    if rms_norm is None or x.dtype == torch.float64:
        return None
    return rms_norm(
        x.reshape(rows),
        None if branch is None else branch.reshape(rows),
        None if weight is None else weight[None],
        None if gate is None else gate.reshape(rows),
        eps,
        torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype,
    )
