"""ReBased: linear attention by a squared inner product whose queries and keys are normalized and shifted."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import ADDITIVE, Transition

LEAST = 1e-5
"""What is added to the denominator: unlike Based's kernel, a square may be 0."""


@dataclass(frozen=True, kw_only=True)
class ReBased(UpdateRule):
    """S_t = S_{t-1} + phi(k'_t) v_t^T,   n_t = n_{t-1} + phi(k'_t),   phi(q)^T phi(k) = (q^T k)^2 / K
    o_t = scale S_t^T phi(q'_t) / (scale n_t^T phi(q'_t) + 1e-5)
    q' = gamma_q * norm(q) + beta_q,   k' = gamma_k * norm(k) + beta_k

    Aksenov et al. 2024 (arXiv:2402.10644): a parabola whose place is learned, in place of Based's Taylor series. norm
    is a layer norm; gamma and beta are learned for each head and channel. phi holds the K (K + 1) / 2 products of two
    channels. n is a last column of S, with value 1. normalize: False leaves norm out, const(1) and const(0) leave out
    gamma and beta; the paper ablates all three.

    Costs what linear_attention costs with K (K + 1) / 2 key channels: 136 for K = 16. The kernels take up to
    256 of them, K = 22.
    """

    name: ClassVar[str] = "rebased"
    paper: ClassVar[str] = "arXiv:2402.10644"

    transition: Transition = ADDITIVE
    gamma_q: Gate = knob(gates.head_channel(init=1), gates.const(1))
    gamma_k: Gate = knob(gates.head_channel(init=1), gates.const(1))
    beta_q: Gate = knob(gates.head_channel(init=0), gates.const(0))
    beta_k: Gate = knob(gates.head_channel(init=0), gates.const(0))
    normalize: bool = knob(True, False)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def key_width(self, key_dim: int) -> int:
        return key_dim * (key_dim + 1) // 2

    def value_width(self, value_dim: int) -> int:
        return value_dim + 1

    def operands(
        self, q: Tensor, k: Tensor, v: Tensor, *, gamma_q: Tensor, gamma_k: Tensor, beta_q: Tensor, beta_k: Tensor
    ) -> Operands:
        r, key = (
            _squares(_placed(q, gamma_q, beta_q, self.normalize)),
            _squares(_placed(k, gamma_k, beta_k, self.normalize)),
        )
        return Operands(r=r, k=key, u=F.pad(v, (0, 1), value=1.0), output=_normalized)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        gamma_q: Tensor,
        gamma_k: Tensor,
        beta_q: Tensor,
        beta_k: Tensor,
    ) -> tuple[Tensor, State]:
        (S,) = state
        r, key = (
            _squares(_placed(q, gamma_q, beta_q, self.normalize)),
            _squares(_placed(k, gamma_k, beta_k, self.normalize)),
        )
        S = S + key[..., None] * torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)[..., None, :]
        return _normalized(scale * torch.einsum("bhk,bhkv->bhv", r, S)), (S,)


def _placed(x: Tensor, gamma: Tensor, beta: Tensor, normalize: bool) -> Tensor:
    """gamma * norm(x) + beta, in the dtype of gamma."""
    gamma, beta = (one if one.dim() > 1 else one[:, None] for one in (gamma, beta))
    x = x.to(gamma.dtype)
    placed: Tensor = gamma * (F.layer_norm(x, x.shape[-1:]) if normalize else x) + beta
    return placed


def _squares(x: Tensor) -> Tensor:
    """phi(x): [.., K] to [.., K (K + 1) / 2]."""
    width = x.shape[-1]
    i, j = torch.triu_indices(width, width, device=x.device)
    weights: Tensor = (2**0.5 + (1 - 2**0.5) * (i == j).to(x.dtype)) / width**0.5
    return weights * x[..., i] * x[..., j]


def _normalized(o: Tensor) -> Tensor:
    return o[..., :-1] / (o[..., -1:] + LEAST)
