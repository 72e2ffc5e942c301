"""Right, though unusual: a memory that takes K = V alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import UpdateRule, knob


@dataclass(frozen=True, kw_only=True)
class Square(UpdateRule):
    name: ClassVar[str] = "unusual_square"
    paper: ClassVar[str] = "none"

    g: Gate = knob(forms.mamba2_decay())

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        if k.shape[-1] != v.shape[-1]:
            raise InputError(f"rule '{self.name}' adds keys to values: set key_dim to value_dim, {v.shape[-1]}")
        q, k, v, g = (x.to(state.dtype) for x in (q, k, v, gates["g"].expand(k.shape[:3])))
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state + k[:, t, :, :, None] * (k[:, t] + v[:, t])[:, :, None, :]
            out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return scale * torch.stack(out, dim=1), state
