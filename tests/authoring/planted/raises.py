"""Planted bug: the rule raises an error in one variant."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import ADDITIVE, Transition


@dataclass(frozen=True, kw_only=True)
class Raises(UpdateRule):
    name: ClassVar[str] = "planted_raises"
    paper: ClassVar[str] = "none"

    transition: Transition = ADDITIVE
    form: str = knob("sum", "mean")

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        if self.form == "mean":
            raise ZeroDivisionError("nothing to divide by")
        return Operands(r=q, k=k, u=v)
