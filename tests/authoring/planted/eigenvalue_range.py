"""Planted bug: beta in [0, 2] allows an eigenvalue of -1, but the rule declares [0, 1]."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class EigenvalueRange(UpdateRule):
    name: ClassVar[str] = "planted_eigenvalue_range"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(gates.sigmoid(max=1), gates.sigmoid(max=2))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=beta[..., None] * v, e=beta)
