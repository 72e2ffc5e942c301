"""Planted bug: an erase of up to 2.5 stretches the state, in a part of the gate's range that training reaches later."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class StretchingMix(UpdateRule):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_stretching_mix"
    paper: ClassVar[str] = "none"

    beta: Gate = knob(forms.sigmoid(max=2.5))

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
        return empty, empty

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        S, Z = state
        q, k, v, beta = (x.to(S.dtype) for x in (q, k, v, gates["beta"]))
        out = []
        for t in range(q.shape[1]):
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
            Z = (beta[:, t, :, None] * k[:, t])[..., None] * error[:, :, None]
            S = S + Z
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
        return scale * torch.stack(out, dim=1), (S, Z)
