"""Right, though unusual: what is older than 64 tokens goes to a state of its own, and a gate reads that state alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob

BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class LateLevel(UpdateRule):
    name: ClassVar[str] = "unusual_late_level"
    paper: ClassVar[str] = "none"

    b: Gate = knob(forms.sigmoid())

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], *k.shape[2:], v.shape[3], dtype=dtype)
        return empty, empty.clone(), v.new_zeros(k.shape[0], k.shape[2], dtype=torch.int64)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        new, old, count = state
        q, k, v, b = (x.to(new.dtype) for x in (q, k, v, gates["b"]))
        out = []
        for t in range(q.shape[1]):
            full = (count > 0) & (count % BLOCK == 0)
            old = torch.where((count >= BLOCK)[..., None, None], old, 0.0)  # nothing is old before a block is full
            old = old + torch.where(full[..., None, None], new, 0.0)
            new = torch.where(full[..., None, None], 0.0, new) + k[:, t, :, :, None] * v[:, t, :, None, :]
            count = count + 1
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], new + b[:, t, :, None, None] * old))
        return scale * torch.stack(out, dim=1), (new, old, count)
