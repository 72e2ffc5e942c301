"""Planted bug: the parallel form reads no token that is more than 64 tokens old."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class ForgetsAfter64(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_forgets_after_64"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        since = g.clamp_min(-1e4).cumsum(1)
        past = since[:, :, None] - since[:, None]
        age = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        seen = ((age >= 0) & (age < 64))[None, :, :, None]
        weights = torch.einsum("bthk,bshk->btsh", q, k) * past.where(seen, -torch.inf).exp()
        o = torch.einsum("btsh,bshv->bthv", weights, v)
        o = o + torch.einsum("bthk,bhkv->bthv", q * since[..., None].exp(), state)
        last = (since[:, -1:] - since).exp()
        state = since[:, -1, :, None, None].exp() * state + torch.einsum("bshk,bshv->bhkv", k * last[..., None], v)
        return scale * o, state
