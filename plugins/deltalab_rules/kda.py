"""Kimi Delta Attention: the delta rule on a state that decays channel by channel."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import Transition


@dataclass(frozen=True, kw_only=True)
class KDA(UpdateRule):
    """S_t = (I - beta_t k_t k_t^T) diag(alpha_t) S_{t-1} + beta_t k_t v_t^T,   alpha_t = exp(g_t)
    o_t = scale S_t^T q_t

    Kimi Team 2025 (arXiv:2510.26692, Eq. 1): the erasure reads the decayed state.
    g: mamba2_decay has an a for each channel and one matrix, where the paper's kda_decay has an a for each head and a
    projection through as many channels as a head's values have. kda_bounded_decay is FLA's `safe_gate`.
    """

    name: ClassVar[str] = "kda"
    paper: ClassVar[str] = "arXiv:2510.26692"
    published = {
        "source": "fla/layers/kda.py of fla-org/flash-linear-attention",
        "knobs": {"g": "kda_decay"},
        "layer": {"gate_rank": 0, "low_rank_bias": True},
    }

    transition: Transition = Transition(name="kda", decay="diagonal", low_rank="tied", reads="decayed_state")
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.kda_decay(), gates.kda_bounded_decay())
    beta: Gate = knob(gates.sigmoid(max=1), gates.sigmoid(max=2))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (min(0.0, 1 - self.beta.high), 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, g=g, e=beta)
