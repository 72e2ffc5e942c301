"""Planted bug: the kernel sums the log-decay in the dtype of v, which may be bf16."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class CoarseDecay(UpdateRule):
    name: ClassVar[str] = "planted_coarse_decay"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        assert isinstance(state, Tensor)
        total = gates["g"].clamp_min(-1000).to(v.dtype).cumsum(1).transpose(1, 2).to(state.dtype)
        q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
        o = total.exp()[..., None] * (q @ state) + (q @ k.transpose(-1, -2) * decay) @ v
        state = total[..., -1:, None].exp() * state + (decay[..., -1, :, None] * k).transpose(-1, -2) @ v
        return scale * o.transpose(1, 2), state
