"""Q-Delta: the delta rule whose error is measured along the key and, in part, along the query."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@parameterization
def feedback(bias: float = 0.9) -> Gate:
    """sigmoid(W x - bias): how much of the query enters the error."""
    return Gate(per="token", low=0.0, high=1.0, value=lambda z, p: (z - bias).sigmoid())


@dataclass(frozen=True, kw_only=True)
class QDelta(UpdateRule):
    """S_t = alpha_t (I - beta_t k_t x_t^T) S_{t-1} + beta_t k_t v_t^T,   x_t = k_t + lam_t q_t
    o_t = scale S_t^T q_t,   alpha_t = exp(g_t)

    "Q-Delta: beyond key-value associative state evolution" (arXiv:2606.08804), in the form of the authors' layer: what
    the state holds along q, where it is read, is part of the error v - S^T (k + lam q) that is written at k. lam = 0 is
    Gated DeltaNet. A step contracts the error while beta x^T k is in (0, 2), but may enlarge a state where q is far
    from k. With random q and k of unit norm, beta = lam = 1 and no decay, outputs of a state of ones stay below 8 over
    4096 tokens, and the state fades.

    Costs what gated_deltanet costs with an erasing key of its own.
    """

    name: ClassVar[str] = "q_delta"
    paper: ClassVar[str] = "arXiv:2606.08804"

    transition: Transition = Transition(name="query_aware", decay="scalar", low_rank="free", reads="decayed_state")
    g: Gate = knob(gates.mamba2_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid())
    lam: Gate = knob(feedback(), gates.const(0.5), gates.const(0))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (1 - self.beta.high * (1 + self.lam.high), 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, lam: Tensor) -> Operands:
        x = k + lam[..., None] * q
        return Operands(r=q, k=k, u=v, g=g, beta=beta, a=-beta[..., None] * k, b=x)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor, lam: Tensor
    ) -> tuple[Tensor, State]:
        S = g.exp()[..., None, None] * state[0]
        along_k, along_q = (torch.einsum("bhk,bhkv->bhv", vector, S) for vector in (k, q))
        error = v - along_k - lam[..., None] * along_q
        S = S + beta[..., None, None] * k[..., None] * error[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)
