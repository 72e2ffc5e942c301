"""Planted bug: b has no effect if both knobs are turned, but has one if either is, so no one-knob variant shows it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class DeadInOneCombination(UpdateRule):
    name: ClassVar[str] = "planted_dead_in_one_combination"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(gates.sigmoid())
    b: Gate = knob(gates.head_sigmoid())
    feedback: str = knob("weaker", "equal")
    output: str = knob("corrected", "plain")

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, b: Tensor) -> Operands:
        e = b * beta if self.feedback == "weaker" else beta
        r = q - b[..., None] * k if self.output == "corrected" else q
        return Operands(r=r, k=k, u=beta[..., None] * v, e=e)
