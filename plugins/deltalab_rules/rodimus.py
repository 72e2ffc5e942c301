"""Rodimus: a decay and an input gate of one selection gate, each at its own temperature."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DIAGONAL, Transition


@parameterization
def selection(low: float = 0.001, high: float = 0.1, rank: float = 16) -> Gate:
    """s = softplus(W_1 W_2 x + c), one for each channel of the key; softplus(c) starts log-uniform in [low, high]."""
    if not 0 < low <= high:
        raise InputError(f"selection: low must be positive and not exceed high, not {low:g} and {high:g}")
    return Gate(
        per="channel",
        low=0.0,
        high=torch.inf,
        rank=int(rank),
        parameters={"bias": gates.mamba2_decay(dt_min=low, dt_max=high).parameters["dt_bias"]},
        value=lambda z, p: F.softplus(z + p["bias"]),
    )


@dataclass(frozen=True, kw_only=True)
class Rodimus(UpdateRule):
    """S_t = diag(exp(-s_t tau_t)) S_{t-1} + (s_t^tau_t k_t) (beta_t v_t)^T,   o_t = scale S_t^T q_t

    He et al. 2024 (arXiv:2410.06577, data-dependent tempered selection): the selection gate s >= 0 decays, to the power
    of a temperature tau in [0, 1] it also scales the key, and beta gates the value. k has unit norm before s scales it.
    tau: const(1) leaves the temperature out; beta: const(1) leaves the value's gate out, and
    value_sigmoid has one for each of its channels, as the paper does. The residual d x of the
    paper's output belongs to the layer.

    Costs what gla costs, with one more gate of K numbers.
    """

    name: ClassVar[str] = "rodimus"
    paper: ClassVar[str] = "arXiv:2410.06577"

    transition: Transition = DIAGONAL
    s: Gate = knob(selection())
    tau: Gate = knob(gates.channel_sigmoid(), gates.const(1))
    beta: Gate = knob(gates.sigmoid(), gates.const(1), gates.value_sigmoid())

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, s: Tensor, tau: Tensor, beta: Tensor) -> Operands:
        tau = tau if tau.dim() > 1 else tau[:, None]
        # s ** tau, with a finite gradient at s = 0.
        tempered = (tau * s.clamp_min(1e-12).log()).exp()
        key = F.normalize(k, dim=-1) * tempered
        if self.beta.per == "value_channel":
            return Operands(r=q, k=key, u=beta * v, g=-s * tau)
        return Operands(r=q, k=key, u=v, g=-s * tau, beta=beta)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, s: Tensor, tau: Tensor, beta: Tensor
    ) -> tuple[Tensor, State]:
        (S,) = state
        beta = beta if self.beta.per == "value_channel" else beta[..., None]
        tau = tau if tau.dim() > 1 else tau[:, None]
        key = s**tau * k / k.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        S = (-s * tau).exp()[..., None] * S + key[..., None] * (beta * v)[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)
