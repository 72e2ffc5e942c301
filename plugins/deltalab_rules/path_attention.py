"""PaTH attention: the position between two tokens is the product of the Householder matrices that lie between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import nothing_seen, sums_between

LEAST = -1e4
"""The least g: a key that has faded this much has no weight, and its sum of g stays finite."""


@dataclass(frozen=True, kw_only=True)
class PathAttention(UpdateRule):
    """o_t = sum_i softmax_i(scale q_t^T P_t P_{t-1} ... P_{i+1} k_i + g_{i+1} + ... + g_t) v_i over i <= t
    P_t = I - beta_t w_t w_t^T,   |w_t| = 1

    Yang et al. 2025 (arXiv:2505.16381): w is projected besides q, k and v, and beta = 2 sigmoid(W x) reaches
    reflections. g = 0 is PaTH, another g is PaTH-FoX. scaled_g: true puts the sum of g into the scale, as FLA's kernel
    does: softmax(scale (q^T P k + g)). The state is the keys as all tokens so far have turned them, the
    values, and the sum of g since each: [B, H, n, K], [B, H, n, V] and [B, H, n, 1]. The parallel form inverts a
    triangular matrix, as DeltaNet's does. A token costs n (3 K + V) after n tokens: it turns every key.
    """

    name: ClassVar[str] = "path_attention"
    paper: ClassVar[str] = "arXiv:2505.16381"

    w: Gate = knob(forms.unit_vector(rank=16), forms.unit_vector())
    beta: Gate = knob(forms.sigmoid(max=2), forms.sigmoid(max=1))
    g: Gate = knob(forms.const(0), forms.metala_decay())
    scaled_g: bool = knob(False, True)

    def __post_init__(self) -> None:
        if self.scaled_g and self.g.constant:
            raise InputError(f"{self.name}.scaled_g has no effect where g is constant: leave it out")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return nothing_seen(k, v)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        old, values, since = state
        past = old.shape[2]
        beta, g = (gates[name].expand(k.shape[:3])[..., None] for name in ("beta", "g"))
        q, k, v, w, beta, g = (x.to(values.dtype).transpose(1, 2) for x in (q, k, v, gates["w"], beta, g))
        keys, values = torch.cat([old, k], dim=2), torch.cat([values, v], dim=2)
        # P_i ... P_{j+1} = I - sum of w_s M_{sr} w_r^T over j < r <= s <= i, where M is that of all tokens at once.
        overlaps = (beta * (w @ w.transpose(-1, -2))).tril(-1)
        onto = (w @ keys.transpose(-1, -2)).tril(past - 1)
        moved = torch.linalg.solve_triangular(overlaps, beta * onto, upper=False, unitriangular=True)
        logits = q @ keys.transpose(-1, -2) - (q @ w.transpose(-1, -2)).tril() @ moved
        g = g.clamp_min(LEAST)
        faded = torch.cat([since.transpose(-1, -2) + g.cumsum(2), sums_between(g[..., 0])], dim=-1)
        o = (scale * logits + (scale if self.scaled_g else 1.0) * faded).softmax(-1) @ values
        return o.transpose(1, 2), (keys - moved.transpose(-1, -2) @ w, values, faded[:, :, -1, :, None])

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Any, **gates: Tensor
    ) -> tuple[Tensor, State]:
        keys, values, since = state
        beta, g = (gates[name].expand(k.shape[:2])[..., None, None] for name in ("beta", "g"))
        w = gates["w"][:, :, None]
        turned = keys - beta * (keys * w).sum(-1, keepdim=True) * w
        keys, values = torch.cat([turned, k[:, :, None]], dim=2), torch.cat([values, v[:, :, None]], dim=2)
        since = torch.cat([since + g.clamp_min(LEAST), torch.zeros_like(g)], dim=2)
        fades = (scale if self.scaled_g else 1.0) * since[..., 0]
        weights = (scale * torch.einsum("bhk,bhnk->bhn", q, keys) + fades).softmax(-1)
        return torch.einsum("bhn,bhnv->bhv", weights, values), (keys, values, since)
