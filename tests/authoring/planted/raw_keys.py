"""Planted bug: raw keys are not of unit norm, which the declared eigenvalues need."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class RawKeys(UpdateRule):
    name: ClassVar[str] = "planted_raw_keys"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)
