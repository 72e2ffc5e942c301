"""Planted bug: a batch of one sequence goes on from the state of the call before."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class ResumesAtOneRow(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_resumes_at_one_row"
    paper: ClassVar[str] = "none"
    _last: ClassVar[Tensor | None] = None

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        dtype = state.dtype
        q, k, v, g = (x.to(dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        if (
            q.shape[0] == 1
            and not state.any()
            and type(self)._last is not None
            and type(self)._last.shape == state.shape
        ):
            state = type(self)._last.to(state)
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * v[:, t, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        type(self)._last = state.detach() if q.shape[0] == 1 else None
        return scale * torch.stack(out, dim=1), state
