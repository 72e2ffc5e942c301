"""Planted bug: the gate declares [0, 1] and reaches 2."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import ADDITIVE, Transition


@parameterization
def twice_sigmoid() -> Gate:
    return Gate(per="token", low=0.0, high=1.0, value=lambda z, p: 2 * z.sigmoid())


@dataclass(frozen=True, kw_only=True)
class GateRange(UpdateRule):
    name: ClassVar[str] = "planted_gate_range"
    paper: ClassVar[str] = "none"

    transition: Transition = ADDITIVE
    beta: Gate = knob(gates.sigmoid(), twice_sigmoid())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=beta[..., None] * v)
