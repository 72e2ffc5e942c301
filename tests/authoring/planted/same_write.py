"""Planted bug: `form=strong` doubles the write, as `keys=doubled` does."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class SameWrite(UpdateRule):
    """S_t = alpha_t S_{t-1} + b_t k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_same_write"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())
    b: Gate = knob(forms.sigmoid())
    keys: str = knob("plain", "doubled")
    form: str = knob("plain", "strong", "cubed")

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, b: Tensor) -> Operands:
        written = 2 * k if self.keys == "doubled" else k
        strength = {"plain": b, "strong": 2 * b, "cubed": b**3}[self.form]
        return Operands(r=q, k=written, u=v, g=g, beta=strength)
