"""Planted bug: a root of a sigmoid, whose gradient is infinite where the sigmoid underflows."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@parameterization
def root_decay() -> Gate:
    """g = -sqrt(sigmoid(W x))."""
    return Gate(
        per="token",
        low=-1.0,
        high=0.0,
        value=lambda z, p: -z.sigmoid().sqrt(),
    )


@dataclass(frozen=True, kw_only=True)
class RootGate(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_root_gate"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(root_decay(), forms.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)
