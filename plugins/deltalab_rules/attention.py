"""Softmax attention, for hybrids: it remembers everything, or the last `window` tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import attend


@dataclass(frozen=True, kw_only=True)
class Attention(UpdateRule):
    """o_t = sum_i softmax_i(scale q_t^T k_i) v_i over i <= t, or over the last `window` tokens, t among them.

    The state is the keys and the values that later tokens can see, [B, H, n, K] and [B, H, n, V].
    window 0 is no window. Vaswani et al. 2017 (arXiv:1706.03762).
    """

    name: ClassVar[str] = "attention"
    paper: ClassVar[str] = "arXiv:1706.03762"
    published = {
        "source": "fla/layers/attn.py of fla-org/flash-linear-attention (Transformer++)",
        "layer": {"conv": 0, "rope": True, "output_norm": False, "output_gate": False},
    }
    window: int = knob(0, 16)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        batch, _, heads, _ = k.shape
        return k.new_empty(batch, heads, 0, k.shape[-1]), v.new_empty(batch, heads, 0, v.shape[-1])

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        keys, values = (
            torch.cat([past, new.transpose(1, 2)], dim=2) if past.shape[2] else new.transpose(1, 2)
            for past, new in zip(state, (k, v), strict=True)
        )
        o = attend(q.transpose(1, 2), keys, values, window=self.window, scale=scale)
        if self.window:
            # The next token sees itself and window - 1 more.
            keep = max(keys.shape[2] - self.window + 1, 0)
            keys, values = keys[:, :, keep:], values[:, :, keep:]
        return o.transpose(1, 2), (keys, values)
