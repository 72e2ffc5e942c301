"""Right, though unusual: keys rounded to signs, with the gradient of the keys themselves."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class StraightThrough(UpdateRule):
    name: ClassVar[str] = "unusual_straight_through"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        signs = k.sign() * k.shape[-1] ** -0.5
        return Operands(r=q, k=k + (signs - k).detach(), u=v, g=g)
