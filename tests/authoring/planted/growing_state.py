"""Planted bug: the log-decay has the wrong sign, so the state grows and overflows."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import SPLR, Transition


@dataclass(frozen=True, kw_only=True)
class GrowingState(UpdateRule):
    name: ClassVar[str] = "planted_growing_state"
    paper: ClassVar[str] = "none"

    transition: Transition = SPLR
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=-g, e=beta, beta=beta)
