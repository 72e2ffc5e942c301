"""Based: linear attention whose features give the second-order Taylor series of softmax attention's exponential."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import ADDITIVE, Transition


@dataclass(frozen=True, kw_only=True)
class Based(UpdateRule):
    """S_t = S_{t-1} + phi(k_t) v_t^T,   n_t = n_{t-1} + phi(k_t)
    o_t = scale S_t^T phi(q_t) / (scale n_t^T phi(q_t))
    phi(q)^T phi(k) = 1 + x + x^2 / 2,   x = q^T k / sqrt(K)

    Arora et al. 2024 (arXiv:2402.18668, Section 4.1, with K = 16). phi(k) holds 1, k / K^(1/4) and the products k_i k_j
    with i <= j, which are K (K + 1) / 2 in place of K^2. n is a last column of S, with value 1; every token adds at
    least 1/2 to the denominator. normalize: without it o_t = scale S_t^T phi(q_t); with it the scale cancels. The
    paper's model alternates with sliding-window attention, which is another rule (`attention`).

    Costs what linear_attention costs with 1 + K + K (K + 1) / 2 key channels: 153 for K = 16. The
    kernels take up to 256 of them, K = 21.
    """

    name: ClassVar[str] = "based"
    paper: ClassVar[str] = "arXiv:2402.18668"

    transition: Transition = ADDITIVE
    normalize: bool = knob(True, False)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    @property
    def silu_of_v(self) -> bool:
        return False

    def key_width(self, key_dim: int) -> int:
        return 1 + key_dim + key_dim * (key_dim + 1) // 2

    def value_width(self, value_dim: int) -> int:
        return value_dim + self.normalize

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        if not self.normalize:
            return Operands(r=_taylor(q), k=_taylor(k), u=v)
        return Operands(r=_taylor(q), k=_taylor(k), u=F.pad(v, (0, 1), value=1.0), output=_normalized)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State) -> tuple[Tensor, State]:
        (S,) = state
        ones = [torch.ones_like(v[..., :1])] * self.normalize
        S = S + _taylor(k)[..., None] * torch.cat([v, *ones], dim=-1)[..., None, :]
        o = scale * torch.einsum("bhk,bhkv->bhv", _taylor(q), S)
        return _normalized(o) if self.normalize else o, (S,)


def _taylor(x: Tensor) -> Tensor:
    """phi(x): [.., K] to [.., 1 + K + K (K + 1) / 2]."""
    width = x.shape[-1]
    i, j = torch.triu_indices(width, width, device=x.device)
    # A product of two different channels stands for two of the K^2, and gets the root of 2.
    weights = (1 + (0.5**0.5 - 1) * (i == j).to(x.dtype)) / width**0.5
    return torch.cat([torch.ones_like(x[..., :1]), x / width**0.25, weights * x[..., i] * x[..., j]], dim=-1)


def _normalized(o: Tensor) -> Tensor:
    return o[..., :-1] / o[..., -1:]
