"""Planted bug: every call starts from an empty state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class LostState(UpdateRule):
    name: ClassVar[str] = "planted_lost_state"
    paper: ClassVar[str] = "none"

    beta: Gate = knob(gates.sigmoid())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        q, k, v = (x.to(gates["beta"].dtype) for x in (q, k, v))
        write = gates["beta"][..., None] * v
        o = scale * torch.einsum("bthk,bshk,bshv->bhtsv", q, k, write)
        seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
        o = o.masked_fill(~seen[..., None], 0.0).sum(3).transpose(1, 2)
        return o, torch.einsum("bshk,bshv->bhkv", k, write)
