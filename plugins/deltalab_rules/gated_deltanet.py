"""Gated DeltaNet: the delta rule on a state that decays first."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import IPLR, Transition


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(UpdateRule):
    """S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t).

    Yang, Kautz and Hatamizadeh 2024 (arXiv:2412.06464, Eq. 10).
    """

    name: ClassVar[str] = "gated_deltanet"
    paper: ClassVar[str] = "arXiv:2412.06464"
    published = {
        "source": "fla/layers/gated_deltanet.py of fla-org/flash-linear-attention",
        "knobs": {"g": {"mamba2_decay": {"a_min": 0.0}}},
        "layer": {"output_gate": "silu"},
    }

    transition: Transition = IPLR
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.metala_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid(max=1), gates.sigmoid(max=2))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (min(0.0, 1 - self.beta.high), 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, g=g, e=beta)
