"""SGLA that reads the state before it writes: found by the search of studies/discover.yaml."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@dataclass(frozen=True, kw_only=True)
class PreStateSGLA(UpdateRule):
    """S_t = alpha_t S_{t-1} + beta_t k_t (value_t * v_t)^T
    o_t = scale S_{t-1}^T (alpha_t q_t - d k_t),   alpha_t = exp(g_t)

    A token reads only what earlier tokens wrote. value: a gate in (0, 1) for each channel of v; 1 leaves it out. d: a
    learned number for each head.

    Found by `studies/discover.yaml --profile gpu`, among 256 candidates of `algebra`, and compared with published rules
    by `studies/pre_state_sgla.yaml`.
    """

    name: ClassVar[str] = "pre_state_sgla"

    transition: Transition = Transition(name="decay_before", decay="scalar", output="before")
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.sigmoid())
    value: Gate = knob(gates.value_sigmoid(), gates.const(1))
    d: Gate = knob(gates.head(init=0.02), gates.const(0))

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, value: Tensor, d: Tensor
    ) -> Operands:
        return Operands(r=q, k=k, u=v if self.value.constant else value * v, g=g, beta=beta, read=g.exp(), d=d)

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
        value: Tensor,
        d: Tensor,
    ) -> tuple[Tensor, State]:
        (S,), alpha = state, g.exp()[..., None]
        value = value if self.value.per == "value_channel" else value[..., None]
        o = scale * torch.einsum("bhk,bhkv->bhv", alpha * q - d[..., None] * k, S)
        return o, (alpha[..., None] * S + (beta[..., None] * k)[..., None] * (value * v)[..., None, :],)
