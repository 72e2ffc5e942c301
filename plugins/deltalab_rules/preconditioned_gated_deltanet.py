"""Preconditioned Gated DeltaNet: the writing key is scaled by how much each of its channels was used."""

from dataclasses import dataclass, replace
from math import log
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.ops.recurrence import recurrence
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY, Transition

SCALAR = Transition(name="scalar", decay="scalar", low_rank="free", reads="decayed_state")
CHANNEL = replace(SCALAR, name="channel", decay="diagonal")

LEAST = 1e-6
"""What is added to the sum of squares before its logarithm is taken."""


@dataclass(frozen=True, kw_only=True)
class PreconditionedGatedDeltaNet(UpdateRule):
    """a_t = exp(g'_t) a_{t-1} + beta'_t k_t^2                                   (by channel)
    p_t = squash ** -(l / (1 + |l|)),   l = log(a_t + 1e-6) - center
    S_t = alpha_t (I - beta_t (p_t * k_t) k_t^T) S_{t-1} + beta_t (p_t * k_t) v_t^T,   alpha_t = exp(g_t)
    o_t = scale S_t^T q_t

    "Preconditioned DeltaNet: curvature-aware sequence modeling for linear recurrences" (arXiv:2604.21100), in the form
    of FLA's layer: a running, decayed sum of squared keys approximates the curvature of the regression that the delta
    rule descends, and its inverse, kept within [1 / squash, squash], scales the key that writes. The key that erases is
    left as it is. g' is `g_p`, beta' `beta_p`; `center` is learned for each head. squash: 1 is Gated DeltaNet; from 2
    on, eigenvalues may fall below -1. a is carried from token to token.

    Costs what gated_deltanet costs with an erasing key of its own, and a scan with one key channel for a.
    """

    name: ClassVar[str] = "preconditioned_gated_deltanet"
    paper: ClassVar[str] = "arXiv:2604.21100"

    transition: Transition = knob(SCALAR, CHANNEL)
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.sigmoid(), gates.sigmoid(max=2))
    g_p: Gate = knob(gates.mamba2_decay(), gates.const(0))
    beta_p: Gate = knob(gates.sigmoid(), gates.const(1))
    center: Gate = knob(gates.head(init=-0.2), gates.const(0))
    squash: float = knob(1.5, 1.25, 2.0)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (1 - self.beta.high * self.squash, 1.0)

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (k.new_zeros(k.shape[0], *k.shape[2:], dtype=torch.promote_types(k.dtype, torch.float32)),)

    def operands(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        g_p: Tensor,
        beta_p: Tensor,
        center: Tensor,
        carry: tuple[Tensor, ...],
    ) -> Operands:
        one = torch.ones_like(beta)[..., None]
        squares = k.to(carry[0].dtype).square()
        sums = Operands(r=one, k=one, u=squares, g=g_p.expand(beta.shape), beta=beta_p.expand(beta.shape))
        a, (last,) = recurrence(DECAY, sums, dtype=squares.dtype, scale=1.0, state=(carry[0].unsqueeze(-2),))
        key = k * self._preconditioner(a, center)
        return Operands(r=q, k=key, u=v, g=g, beta=beta, a=-beta[..., None] * key, b=k, carry=(last.squeeze(-2),))

    def _preconditioner(self, a: Tensor, center: Tensor) -> Tensor:
        away = (a + LEAST).log() - center[..., None]
        return (-log(self.squash) * away / (1 + away.abs())).exp()

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        g: Tensor,
        beta: Tensor,
        g_p: Tensor,
        beta_p: Tensor,
        center: Tensor,
    ) -> tuple[Tensor, State]:
        S, a = state
        a = g_p.exp()[..., None] * a + beta_p[..., None] * k**2
        away = torch.log(a + LEAST) - center[..., None]
        key = k * self.squash ** (-away / (1 + away.abs()))
        alpha = g.exp()[..., None, None] if self.transition == SCALAR else g.exp()[..., None]
        S = alpha * S
        error = v - torch.einsum("bhk,bhkv->bhv", k, S)
        S = S + beta[..., None, None] * key[..., None] * error[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S, a)
