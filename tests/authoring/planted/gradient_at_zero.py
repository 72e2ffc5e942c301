"""Planted bug: the gradient of a norm of 0 is not a number."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class GradientAtZero(UpdateRule):
    name: ClassVar[str] = "planted_gradient_at_zero"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        size = k.square().sum(-1, keepdim=True).sqrt()
        return Operands(r=q, k=k * (1 + size) / (1 + size.detach()), u=v * (1 + size), e=beta, beta=beta)
