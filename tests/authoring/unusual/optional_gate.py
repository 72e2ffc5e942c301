"""Right, though unusual: a gate that has no effect with one option, as the rule declares."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class OptionalGate(UpdateRule):
    name: ClassVar[str] = "unusual_optional_gate"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())
    d: Gate = knob(forms.head(init=0.5))
    corrected: bool = knob(True, False)

    @property
    def ignores(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset() if self.corrected else frozenset({"d"})

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, d: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta, d=d if self.corrected else None)
