"""Planted bug: in fp32 and bf16 the erasure is approximated."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class SinglePrecisionBranch(UpdateRule):
    name: ClassVar[str] = "planted_single_precision_branch"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        e = beta if q.dtype == torch.float64 else beta * (1 - beta / 8)
        return Operands(r=q, k=k, u=v, e=e, beta=beta)
