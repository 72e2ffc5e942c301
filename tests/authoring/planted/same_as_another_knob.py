"""Planted bug: `write=halved` computes the same output as `read=halved`."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class SameAsAnotherKnob(UpdateRule):
    """S_t = alpha_t S_{t-1} + b_t k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_same_as_another_knob"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())
    b: Gate = knob(forms.sigmoid())
    read: str = knob("plain", "squared", "halved")
    write: str = knob("plain", "halved", "unit")

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, b: Tensor) -> Operands:
        r = {"plain": q, "squared": q * q, "halved": q / 2}[self.read]
        u = {"plain": v, "halved": v / 2, "unit": v / (v.norm(dim=-1, keepdim=True) + 1)}[self.write]
        return Operands(r=r, k=k, u=u, g=g, beta=b)
