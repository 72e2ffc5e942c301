"""Planted bug: the state is clamped after each chunk, which only large values show."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as gate_forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class ClampsChunks(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_clamps_chunks"

    g: Gate = knob(gate_forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        S = state
        q, k, v, g = (x.to(S) for x in (q, k, v, gates["g"]))
        out = []
        for begin in range(0, q.shape[1], 16):
            at = slice(begin, begin + 16)
            G = g[:, at].clamp_min(-60).cumsum(1)
            apart = (G[:, :, None] - G[:, None]).movedim(-1, 1)
            n = apart.shape[-1]
            causal = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            decay = apart.masked_fill(~causal, -torch.inf).exp()
            scores = torch.einsum("bthk,bshk->bhts", q[:, at], k[:, at]) * decay
            o = torch.einsum("bhts,bshv->bthv", scores, v[:, at])
            o = o + torch.einsum("bthk,bhkv->bthv", q[:, at] * G.exp()[..., None], S)
            last = (G[:, -1:] - G).exp()[..., None]
            S = G[:, -1].exp()[..., None, None] * S + torch.einsum("bshk,bshv->bhkv", k[:, at] * last, v[:, at])
            S = S.clamp(-10, 10)
            out.append(scale * o)
        return torch.cat(out, 1), S

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor) -> tuple[Tensor, State]:
        (S,) = state
        S = g.exp()[..., None, None] * S + k[..., None] * v[:, :, None]
        return scale * torch.einsum("bhkv,bhk->bhv", S, q), (S,)
