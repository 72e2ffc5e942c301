"""Kaczmarz linear attention: the delta rule whose step is divided by the squared norm of the key."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import IPLR, Transition

LEAST = 1e-6
"""What is added to the squared norm of a key."""


@dataclass(frozen=True, kw_only=True)
class Kaczmarz(UpdateRule):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   beta_t = eta_t / (|k_t|^2 + 1e-6)
    o_t = scale S_t^T q_t,   alpha_t = exp(g_t)

    "Kaczmarz linear attention" (arXiv:2605.08587): Gated DeltaNet's step, with the length that projects onto
    S^T k = v if eta = 1 (Kaczmarz 1937). Keys keep their norm, so that a short key is answered as exactly as a long
    one. Equation and 1e-6 are taken from readers' summaries and code: the paper was not at hand.

    Costs what gated_deltanet costs.
    """

    name: ClassVar[str] = "kaczmarz"
    paper: ClassVar[str] = "arXiv:2605.08587"

    transition: Transition = IPLR
    g: Gate = knob(gates.mamba2_decay(), gates.const(0))
    eta: Gate = knob(gates.sigmoid(), gates.const(1))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "silu"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, eta: Tensor) -> Operands:
        # Keys of unit norm, and values divided by the norm: a strength of eta / |k|^2 may be large.
        wide = k.to(torch.promote_types(k.dtype, torch.float32))
        shrink = (wide.square().sum(-1) + LEAST).rsqrt()
        return Operands(r=q, k=(shrink[..., None] * wide).to(k.dtype), u=v, g=g, e=eta, beta=eta * shrink)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, eta: Tensor
    ) -> tuple[Tensor, State]:
        S = g.exp()[..., None, None] * state[0]
        beta = (eta / (k.square().sum(-1) + LEAST))[..., None, None]
        S = S + beta * k[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, S))[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)
