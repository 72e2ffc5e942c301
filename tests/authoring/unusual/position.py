"""Right, though unusual: a state that counts tokens, in whole numbers, and a mean of all values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.rule import State, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Position(UpdateRule):
    name: ClassVar[str] = "unusual_position"
    paper: ClassVar[str] = "none"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
        return empty, torch.zeros(k.shape[0], k.shape[2], dtype=torch.long)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:

        memory, count = state
        q, k, v = (x.to(memory.dtype) for x in (q, k, v))
        out = []
        for t in range(q.shape[1]):
            count = count + 1
            memory = memory + (k[:, t, :, :, None] * v[:, t, :, None, :] - memory) / count[..., None, None]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], memory))
        return scale * torch.stack(out, dim=1), (memory, count)
