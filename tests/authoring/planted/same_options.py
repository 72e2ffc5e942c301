"""Planted bug: two options of a knob compute the same function."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class SameOptions(UpdateRule):
    name: ClassVar[str] = "planted_same_options"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())
    form: str = knob("plain", "unit", "normed")

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        q = (
            q
            if self.form == "plain"
            else F.normalize(q, dim=-1)
            if self.form == "unit"
            else q / q.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        )
        q = q if self.form == "plain" else 2 * q
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)
