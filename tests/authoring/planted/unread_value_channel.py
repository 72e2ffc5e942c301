"""Planted bug: the last channel of v is overwritten by the first."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class UnreadValueChannel(UpdateRule):
    name: ClassVar[str] = "planted_unread_value_channel"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        u = torch.cat([v[..., :-1], v[..., :1]], dim=-1)
        return Operands(r=q, k=k, u=u, e=beta, beta=beta)
