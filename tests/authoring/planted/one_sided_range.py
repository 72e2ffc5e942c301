"""Planted bug: the declared range of eigenvalues begins at -3, where no eigenvalue is."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class OneSidedRange(UpdateRule):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_one_sided_range"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-3.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)
