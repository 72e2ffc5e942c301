"""DeltaNet that reads the state before it writes, and erases less than it writes: found by studies/discover.yaml."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@dataclass(frozen=True, kw_only=True)
class PreStateDeltaNet(UpdateRule):
    """S_t = (I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T
    o_t = scale S_{t-1}^T (q_t - d k_t)

    A token reads only what earlier tokens wrote. b: the part in (0, 1) of a write's strength with which it erases,
    learned for each head, as in Comba (Hu et al. 2025, arXiv:2506.02475). d: a learned number for each head.

    Found by `studies/discover.yaml --profile gpu`, among 256 candidates of `algebra`. `studies/found_rules.yaml`
    compares it with published rules, `studies/found_parts.yaml` with itself without each part.
    """

    name: ClassVar[str] = "pre_state_deltanet"

    transition: Transition = Transition(name="householder_before", low_rank="tied", output="before")
    beta: Gate = knob(gates.sigmoid())
    b: Gate = knob(gates.head_sigmoid(), gates.const(1))
    d: Gate = knob(gates.head(init=0.02), gates.const(0))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (1 - self.b.high * self.beta.high, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, b: Tensor, d: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=b * beta, beta=beta, d=d)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, beta: Tensor, b: Tensor, d: Tensor
    ) -> tuple[Tensor, State]:
        (S,), b, d = state, b[..., None], d[..., None]
        o = scale * torch.einsum("bhk,bhkv->bhv", q - d * k, S)
        write = beta[..., None] * (v - b * torch.einsum("bhk,bhkv->bhv", k, S))
        return o, (S + k[..., None] * write[..., None, :],)
