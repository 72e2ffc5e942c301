"""Right, though unusual: a state of logarithms, which begins with -inf, the logarithm of 0."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import State, UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class LogSpace(UpdateRule):
    name: ClassVar[str] = "unusual_log_space"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        empty = v.new_zeros(k.shape[0], k.shape[2], v.shape[3], dtype=dtype)
        return empty - torch.inf, empty

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:

        total, mean = state  # the logarithm of the sum of weights, and the weighted mean of values
        q, k, v, g = (x.to(mean.dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        out = []
        for t in range(q.shape[1]):
            new = k[:, t].sum(-1, keepdim=True).expand(mean.shape)
            kept = (g[:, t, :, None] + total).clamp_min(-1e4)
            share = (new - kept).sigmoid()
            mean = mean + share * (v[:, t] - mean)
            total = torch.logaddexp(kept, new)
            out.append(mean * q[:, t].sum(-1, keepdim=True))
        return scale * torch.stack(out, dim=1), (total, mean)
