"""Planted bug: a gate reaches the output by its sign alone, which has no gradient."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class SignWithoutGradient(UpdateRule):
    """S_t = s_t alpha_t S_{t-1} + k_t v_t^T,   s_t = sign(b_t - 1/2),   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_sign_without_gradient"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())
    b: Gate = knob(forms.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, b: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g, sign=(b - 0.5).sign())
