"""Gated linear attention whose decays reach -1, so that a channel of the state can count modulo two."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DIAGONAL, Transition


def _alpha(g: Tensor) -> Tensor:
    """2 exp(g) - 1 in fp32 or wider: a difference, which 16 bits would lose near 0."""
    return 2 * g.to(torch.promote_types(g.dtype, torch.float32)).exp() - 1


@dataclass(frozen=True, kw_only=True)
class SignedGLA(UpdateRule):
    """S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = 2 exp(g_t) - 1

    Grazzi et al. 2024 (arXiv:2411.12537), who extend the decays of Mamba from [0, 1] to [-1, 1] so: with positive
    eigenvalues alone, parity cannot be tracked. negative: without it alpha_t = exp(g_t), which is GLA. Costs what GLA
    does: signs move into q and k.
    """

    name: ClassVar[str] = "signed_gla"
    paper: ClassVar[str] = "arXiv:2411.12537"

    transition: Transition = DIAGONAL
    g: Gate = knob(gates.gla_decay(), gates.metala_decay())
    negative: bool = knob(True, False)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0 if self.negative else 0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        if not self.negative:
            return Operands(r=q, k=k, u=v, g=g)
        alpha = _alpha(g)
        sign = torch.where(alpha < 0, -torch.ones_like(alpha), torch.ones_like(alpha))
        # d g is d log |alpha|, a difference with an error of its own, times 1 / |alpha|. So |alpha| is at least
        # 6e-6 in fp32, with the gradient of alpha itself.
        magnitude = sign * alpha
        least = torch.finfo(alpha.dtype).eps ** 0.75
        magnitude = magnitude + (magnitude.clamp_min(least) - magnitude).detach()
        return Operands(r=q, k=k, u=v, g=magnitude.log(), sign=sign)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor) -> tuple[Tensor, State]:
        alpha = _alpha(g) if self.negative else g.exp()
        S = alpha[..., None] * state[0] + k[..., None] * v[..., None, :]
        return scale * (q[..., None] * S).sum(-2), (S,)
