"""Right, though unusual: the product of two gates that both start at 0, where one of them has a gradient elsewhere."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class TwoZeroStarts(UpdateRule):
    name: ClassVar[str] = "unusual_two_zero_starts"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())
    a: Gate = knob(forms.head(init=0))
    b: Gate = knob(forms.head(init=0))

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, a: Tensor, b: Tensor) -> Operands:
        return Operands(r=q + a[:, None] * k + (a * b)[:, None] * q.flip(-1), k=k, u=v, g=g)
