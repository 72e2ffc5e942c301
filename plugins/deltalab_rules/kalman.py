"""The Kalman filter: exact online ridge regression, token by token, which Gated KalmaNet approximates in parallel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class Kalman(UpdateRule):
    """m_t = eta_t Phi_{t-1} k_t / (1 + eta_t k_t^T Phi_{t-1} k_t)
    S_t = S_{t-1} + m_t (v_t - S_{t-1}^T k_t)^T
    Phi_t = Phi_{t-1} - m_t (Phi_{t-1} k_t)^T,   Phi_0 = I / ridge
    o_t = scale S_t^T q_t

    S_t minimizes ridge ||S||^2 + sum_{i <= t} eta_i ||S^T k_i - v_i||^2 exactly, and Phi_t is the inverse of its
    Hessian by the Woodbury identity (Kalman 1960; arXiv:2511.21016, Eq. 3 and KF). The state is (Phi, S). Nothing is
    forgotten, and no form of it is parallel: every backend goes token by token, at 3 K^2 + 2 K V a token.
    """

    name: ClassVar[str] = "kalman"
    paper: ClassVar[str] = "arXiv:2511.21016"

    eta: Gate = knob(forms.sigmoid(), forms.const(1))
    ridge: float = knob(1.0, 0.25, 0.01)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        batch, _, heads, key_dim = k.shape
        inverse = torch.eye(key_dim, dtype=dtype, device=k.device) / self.ridge
        empty = v.new_zeros(batch, heads, key_dim, v.shape[-1], dtype=dtype)
        return inverse.expand(batch, heads, -1, -1), empty

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        inverse, memory = state
        q, k, v, eta = (x.to(memory.dtype) for x in (q, k, v, gates["eta"].expand(k.shape[:3])))
        out = []
        for t in range(q.shape[1]):
            key, weight = k[:, t, :, :, None], eta[:, t, :, None, None]
            seen = inverse @ key
            gain = weight * seen / (1 + weight * (key * seen).sum(-2, keepdim=True))
            memory = memory + gain @ (v[:, t, :, None] - key.transpose(-1, -2) @ memory)
            inverse = inverse - gain @ seen.transpose(-1, -2)
            out.append((q[:, t, :, None] @ memory).squeeze(-2))
        return scale * torch.stack(out, dim=1), (inverse, memory)
