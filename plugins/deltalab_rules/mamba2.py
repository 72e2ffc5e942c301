"""Mamba2: a scalar decay and a step size from one projection."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class Mamba2(UpdateRule):
    """S_t = alpha_t S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t).

    g_t = -a softplus(W x_t + c) and beta_t = softplus(W x_t + c) share W and c: what forgets little writes little.
    Dao and Gu 2024 (arXiv:2405.21060), in the notation of arXiv:2506.02475, Tables 1 and 5.
    """

    name: ClassVar[str] = "mamba2"
    paper: ClassVar[str] = "arXiv:2405.21060"

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.mamba2_step(), gates.sigmoid(), gates.const(1))

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, g=g)
