"""Erase-then-Delta: an erasure at an address of its own, then the delta rule's write."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition

CHANNEL = Transition(name="channel", decay="diagonal", low_rank="tied", reads="decayed_state", steps=2)
SCALAR = replace(CHANNEL, name="scalar", decay="scalar")


@dataclass(frozen=True, kw_only=True)
class EraseThenDelta(UpdateRule):
    """S_t = (I - beta_t k_t k_t^T) (I - gamma_t e_t e_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T
    o_t = scale S_t^T q_t,   alpha_t = exp(g_t)

    "Erase-then-Delta Attention: decoupling erase and write addresses in delta-rule linear attention"
    (arXiv:2606.26560): what lies at the address e is removed with strength gamma, before the delta rule corrects and
    writes at k. With gamma = 0 it is `kda`, with transition `scalar` `gated_deltanet`. e is a vector of unit norm from
    16 channels of the token, which all heads share here, where theirs has 16 for each head; the layer convolves it and
    gives it SiLU, as it does k. The equation and the width 16 are taken from a reader's notes of the paper.

    Costs what kda costs with two rows per token.
    """

    name: ClassVar[str] = "erase_then_delta"
    paper: ClassVar[str] = "arXiv:2606.26560"

    transition: Transition = knob(CHANNEL, SCALAR)
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay())
    beta: Gate = knob(gates.sigmoid(), gates.sigmoid(max=2))
    gamma: Gate = knob(gates.sigmoid(), gates.const(1))
    e: Gate = knob(gates.unit_vector(rank=16), gates.unit_vector())

    @property
    def steps(self) -> int:
        return 1

    @property
    def eigenvalues(self) -> tuple[float, float]:
        """A product of three contractions without negative eigenvalues has real parts of at least -1/8."""
        return (-0.125 if self.beta.high <= 1 else -1.0, 1.0)

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, gamma: Tensor, e: Tensor
    ) -> Operands:
        nothing = torch.zeros_like(beta)
        return Operands(
            r=q,
            k=_rows(e.to(k.dtype), k),
            u=_rows(torch.zeros_like(v), v),
            g=_rows(g, torch.zeros_like(g)),
            e=_rows(gamma.expand(beta.shape), beta),
            beta=_rows(nothing, beta),
        )

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
        gamma: Tensor,
        e: Tensor,
    ) -> tuple[Tensor, State]:
        alpha = g.exp()[..., None, None] if self.transition.decay == "scalar" else g.exp()[..., None]
        S = alpha * state[0]
        S = S - gamma[..., None, None] * e[..., None] * torch.einsum("bhk,bhkv->bhv", e, S)[..., None, :]
        S = S + beta[..., None, None] * k[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, S))[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)


def _rows(first: Tensor, second: Tensor) -> Tensor:
    """Two rows for each token, [B, T, ...] twice to [B, 2 T, ...]."""
    return torch.stack([first, second], dim=2).flatten(1, 2)
