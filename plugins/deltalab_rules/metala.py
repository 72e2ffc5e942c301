"""MetaLA: a forget gate and an input gate that sum to one."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class MetaLA(UpdateRule):
    """S_t = alpha_t S_{t-1} + (1 - alpha_t) k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = sigmoid(W x_t).

    Chou et al. 2024 (arXiv:2411.10741) in the form of arXiv:2506.02475, Table 5: one alpha a head, where the original
    has one a channel and 1 - alpha for its key. beta is 1 - alpha from the same projection.
    """

    name: ClassVar[str] = "metala"
    paper: ClassVar[str] = "arXiv:2411.10741"

    transition: Transition = DECAY
    g: Gate = knob(gates.metala_decay())
    beta: Gate = knob(gates.metala_input(), gates.sigmoid(), gates.const(1))

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, g=g)
