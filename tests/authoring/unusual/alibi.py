"""Right, though unusual: attention with slopes that `mix` gives each head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class Alibi(UpdateRule):
    name: ClassVar[str] = "unusual_alibi"
    paper: ClassVar[str] = "none"

    window: int = knob(0, 8)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return k.new_empty(*k[:, 0].shape[:2], 0, k.shape[-1]), v.new_empty(*k[:, 0].shape[:2], 0, v.shape[-1])

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:

        keys, values = (torch.cat([past, new.transpose(1, 2)], 2) for past, new in zip(state, (k, v), strict=True))
        wide = torch.promote_types(q.dtype, torch.float32)
        heads, before = q.shape[2], keys.shape[2] - q.shape[1]
        age = (torch.arange(q.shape[1])[:, None] + before - torch.arange(keys.shape[2])).to(wide)
        slopes = 2.0 ** (-8 * torch.arange(1, heads + 1, dtype=wide) / heads)
        seen = (age >= 0) & (age < self.window if self.window else age >= 0)
        scores = scale * (q.transpose(1, 2).to(wide) @ keys.mT.to(wide)) - slopes[:, None, None] * age
        o = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values.to(wide)
        if self.window:
            keys, values = (x[:, :, max(x.shape[2] - self.window + 1, 0) :] for x in (keys, values))
        return o.transpose(1, 2), (keys, values)
