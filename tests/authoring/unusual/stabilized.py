"""Right, though unusual: exponential input gates with a stabilizer, which begins at -inf."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class Stabilized(UpdateRule):
    name: ClassVar[str] = "unusual_stabilized"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())
    i: Gate = knob(forms.head(init=0.5))

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
        return empty, empty[..., 0].clone(), empty[..., 0, 0] - torch.inf

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:

        memory, weight, most = state
        q, k, v, g, i = (x.to(memory.dtype) for x in (q, k, v, *(gates[n].expand(k.shape[:3]) for n in "gi")))
        out = []
        for t in range(q.shape[1]):
            now = torch.maximum(g[:, t] + most, i[:, t])
            keep, write = (g[:, t] + most - now).exp(), (i[:, t] - now).exp()
            memory = keep[..., None, None] * memory + write[..., None, None] * k[:, t, :, :, None] * v[:, t, :, None]
            weight = keep[..., None] * weight + write[..., None] * k[:, t]
            most = now
            size = (q[:, t] * weight).sum(-1).abs()
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory) / torch.maximum(size, (-most).exp())[..., None])
        return scale * torch.stack(out, dim=1), (memory, weight, most)
