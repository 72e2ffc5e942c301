"""Planted bug: the declared range of eigenvalues is far wider than the eigenvalues."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class WideRange(UpdateRule):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_wide_range"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-4.0, 4.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)
