"""Planted bug: a knob is changed after it was set, so that the spec makes another rule."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class SpecLost(UpdateRule):
    name: ClassVar[str] = "planted_spec_lost"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())
    gain: float = knob(1.0, 2.0, 3.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "gain", 1.5 * self.gain if self.gain > 1 else self.gain)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=self.gain * q, k=k, u=v, e=beta, beta=beta)
