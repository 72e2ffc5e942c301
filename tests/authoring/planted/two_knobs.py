"""Planted bug: with two of six knobs turned together, the erasure is twice as strong."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class TwoKnobs(UpdateRule):
    name: ClassVar[str] = "planted_two_knobs"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())
    a: int = knob(1, 2, 3)
    b: int = knob(1, 2, 3)
    c: int = knob(1, 2, 3)
    d: int = knob(1, 2, 3)
    f: int = knob(1, 2, 3)
    h: int = knob(1, 2, 3)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        e = 2 * beta if self.c == 2 and self.f == 3 else beta
        powers = self.a * q + self.b * q**2 + self.c * q**3 + self.d * q**4 + self.f * q**5 + self.h * q**6
        return Operands(r=powers, k=k, u=v, e=e, beta=beta)
