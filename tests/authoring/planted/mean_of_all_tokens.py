"""Planted bug: sequences of more than 1024 tokens are centred by a mean over all tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class MeanOfAllTokens(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_mean_of_all_tokens"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        if q.shape[1] > 1024:
            v = v - 0.01 * v.mean(1, keepdim=True)
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state
