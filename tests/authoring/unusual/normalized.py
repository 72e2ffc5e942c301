"""Right, though unusual: a normalizer of its own, in which the scale cancels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import State, UpdateRule


@dataclass(frozen=True, kw_only=True)
class Normalized(UpdateRule):
    name: ClassVar[str] = "unusual_normalized"
    paper: ClassVar[str] = "none"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=dtype)
        return empty, empty[..., 0].clone()

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:

        memory, weight = state
        q, k = (F.elu(x.to(memory.dtype)) + 1 for x in (q, k))
        written = k[..., None] * v.to(memory.dtype)[..., None, :]
        memories, weights = memory[:, None] + written.cumsum(1), weight[:, None] + k.cumsum(1)
        o = torch.einsum("bthk,bthkv->bthv", q, memories) / (q * weights).sum(-1, keepdim=True)
        return o, (memories[:, -1], weights[:, -1])
