"""Right, though unusual: several steps for each token, with gates of their own and eigenvalues down to -1."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import Transition


@dataclass(frozen=True, kw_only=True)
class Swapping(UpdateRule):
    name: ClassVar[str] = "unusual_swapping"
    paper: ClassVar[str] = "none"

    per_step: ClassVar[frozenset[str]] = frozenset({"beta"})
    transition: Transition = Transition(name="two steps", low_rank="tied", steps=2)
    beta: Gate = knob(forms.sigmoid(max=2))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)
