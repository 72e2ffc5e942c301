"""Comba: the delta rule in closed loop, with feedback weaker than the input and a corrected output."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DPLR, IPLR, SPLR, Transition


@dataclass(frozen=True, kw_only=True)
class Comba(UpdateRule):
    """S_t = (alpha_t I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   alpha_t = exp(g_t)        (SPLR)
    S_t = alpha_t (I - 2 b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                             (IPLR)
    S_t = (diag(alpha_t) - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T                           (DPLR)
    o_t = scale S_t^T (q_t - d k_t)   or, through p_t = b k_t,   scale S_t^T (q_t - d p_t)

    Hu et al. 2025 (arXiv:2506.02475, Eq. 5 and Table 4; App. B.3 for p), with a DPLR as Section 3 writes RWKV-7's. The
    paper calls the two forms of the output equivalent; they differ by the factor b in the correction, so they are a
    knob here. FLA's kernels normalize p, which cancels b: nothing is normalized after a gate has scaled it here.
    """

    name: ClassVar[str] = "comba"
    paper: ClassVar[str] = "arXiv:2506.02475"

    transition: Transition = knob(SPLR, IPLR, DPLR)
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.metala_decay())
    beta: Gate = knob(gates.sigmoid())
    b: Gate = knob(gates.head_sigmoid(), gates.const(1))
    d: Gate = knob(gates.head(init=0.02), gates.head(init=1), gates.const(0))
    correction: str = knob("k", "p")

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, b: Tensor, d: Tensor) -> Operands:
        strength = d if self.correction == "k" else d * b
        feedback = 2 * b * beta if self.transition is IPLR else b * beta
        return Operands(r=q, k=k, u=v, g=g, e=feedback, beta=beta, d=strength)
