"""Forgetting attention (FoX): softmax attention whose logits fade by a forget gate, as the state of Mamba2 does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import nothing_seen, sums_between

LEAST = -1e4
"""The least g: a key that has faded this much has no weight, and its sum of g stays finite."""


@parameterization
def head_forget(init: float = 3.0) -> Gate:
    """g = log sigmoid(b) with a learned b for each head, starting at `init`: FoX's gate without the input."""
    return Gate(
        per="head",
        low=-torch.inf,
        high=0.0,
        parameters={"bias": lambda shape, generator: torch.full(shape, float(init))},
        value=lambda z, p: F.logsigmoid(z + p["bias"]),
    )


@dataclass(frozen=True, kw_only=True)
class ForgettingAttention(UpdateRule):
    """o_t = sum_i softmax_i(scale q_t^T k_i + d_{ti}) v_i over i <= t,   d_{ti} = g_{i+1} + ... + g_t

    Lin et al. 2025 (arXiv:2503.02130, Eq. 4-6), g_t = log f_t. The gates of the paper's ablation: `metala_decay` is
    its f_t = sigmoid(W x), `biased_decay` is sigmoid(W x + c) as in its code, `head_forget` does not look at the input,
    `lightning_decay` is ALiBi, and g = 0 is softmax attention. The state is the keys, the values and the sum of g since
    each of them: [B, H, n, K], [B, H, n, V] and [B, H, n, 1]. A token costs n (K + V) after n tokens.
    """

    name: ClassVar[str] = "forgetting_attention"
    paper: ClassVar[str] = "arXiv:2503.02130"
    published = {
        "source": "fla/layers/forgetting_attn.py of fla-org/flash-linear-attention",
        "knobs": {"g": "biased_decay"},
        "layer": {"conv": 0, "output_norm": False, "output_gate": False},
    }

    g: Gate = knob(forms.metala_decay(), head_forget(), forms.lightning_decay(), forms.const(0), forms.biased_decay())

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return nothing_seen(k, v)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        keys, values, since = state
        q, k, v = (x.to(values.dtype).transpose(1, 2) for x in (q, k, v))
        g = gates["g"].clamp_min(LEAST).expand(k.shape[0], k.shape[2], k.shape[1]).to(values.dtype).transpose(1, 2)
        faded = torch.cat([since.transpose(-1, -2) + g.cumsum(-1)[..., None], sums_between(g)], dim=-1)
        keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
        o = (scale * q @ keys.transpose(-1, -2) + faded).softmax(-1) @ values
        return o.transpose(1, 2), (keys, values, faded[:, :, -1, :, None])

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Any, **gates: Tensor
    ) -> tuple[Tensor, State]:
        keys, values, since = state
        keys, values = torch.cat([keys, k[:, :, None]], dim=2), torch.cat([values, v[:, :, None]], dim=2)
        g = gates["g"].clamp_min(LEAST).expand(k.shape[:2])[..., None, None]
        since = torch.cat([since + g, torch.zeros_like(g)], dim=2)
        weights = (scale * torch.einsum("bhk,bhnk->bhn", q, keys) + since[..., 0]).softmax(-1)
        return torch.einsum("bhn,bhnv->bhv", weights, values), (keys, values, since)
