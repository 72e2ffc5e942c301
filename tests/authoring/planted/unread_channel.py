"""Planted bug: the last channel of the query is not read."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class UnreadChannel(UpdateRule):
    name: ClassVar[str] = "planted_unread_channel"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        mask = torch.ones_like(q)
        mask[..., -1] = 0.0
        return Operands(r=q * mask, k=k, u=v, e=beta, beta=beta)
