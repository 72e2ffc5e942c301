"""Planted bug: attention multiplies its scores by the scale twice."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.rule import State, UpdateRule


@dataclass(frozen=True, kw_only=True)
class SoftmaxScaleTwice(UpdateRule):
    """o_t = sum_i softmax_i(scale q_t^T k_i) v_i."""

    name: ClassVar[str] = "planted_softmax_scale_twice"
    paper: ClassVar[str] = "none"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return k.new_empty(*k[:, 0].shape[:2], 0, k.shape[-1]), v.new_empty(*k[:, 0].shape[:2], 0, v.shape[-1])

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        keys, values = (torch.cat([past, new.transpose(1, 2)], 2) for past, new in zip(state, (k, v), strict=True))
        future = torch.ones(q.shape[1], keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - q.shape[1] + 1)
        scores = (q.transpose(1, 2) @ keys.mT * scale**2).masked_fill(future, -torch.inf)
        return (scores.softmax(-1) @ values).transpose(1, 2), (keys, values)
