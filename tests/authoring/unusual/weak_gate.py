"""Right, though unusual: a gate with a weak effect."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class WeakGate(UpdateRule):
    name: ClassVar[str] = "unusual_weak_gate"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())
    b: Gate = knob(forms.sigmoid())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, b: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g, beta=1 + 0.01 * b)
