"""Planted bug: values beyond channel 48 are scaled as if there were 48."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class ValuesOf64(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_values_of_64"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        v = torch.cat([v[..., :48], v[..., 48:] * 0.5], dim=-1)
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: tuple[Tensor, ...], g: Tensor
    ) -> tuple[Tensor, Tensor]:
        (S,) = state
        S = g[..., None, None].exp() * S + k[..., None] * v[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), S
