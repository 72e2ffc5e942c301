"""Linear attention: the plain sum of key-value pairs, which forgets nothing."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab.rule import Operands, UpdateRule
from deltalab.structure import ADDITIVE, Transition


@dataclass(frozen=True, kw_only=True)
class LinearAttention(UpdateRule):
    """S_t = S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t.

    Katharopoulos et al. 2020 (arXiv:2006.16236), with unit-norm SiLU features and without the normalizer.
    """

    name: ClassVar[str] = "linear_attention"
    paper: ClassVar[str] = "arXiv:2006.16236"

    transition: Transition = ADDITIVE

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v)
