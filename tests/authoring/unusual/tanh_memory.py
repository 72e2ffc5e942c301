"""Right, though unusual: a memory whose entries a tanh keeps between -1 and 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class TanhMemory(UpdateRule):
    name: ClassVar[str] = "unusual_tanh_memory"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g = (x.to(state.dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        out = []
        for t in range(q.shape[1]):
            state = (g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]).tanh()
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state
