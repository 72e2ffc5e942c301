"""Planted bug: values are dropped at random where gradients are computed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class DropoutInTraining(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_dropout_in_training"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        if v.requires_grad:
            v = v * (torch.rand(v.shape[:3], device=v.device) < 0.9)[..., None]
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state
