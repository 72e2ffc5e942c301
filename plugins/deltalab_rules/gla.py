"""Gated linear attention: a decay for each channel of the key."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DIAGONAL, Transition


@dataclass(frozen=True, kw_only=True)
class GLA(UpdateRule):
    """S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = sigmoid(W_1 W_2 x_t)^(1/tau).

    Yang et al. 2023 (arXiv:2312.06635, Eq. 3), without the bias of W_2, as in arXiv:2506.02475, Table 5.
    """

    name: ClassVar[str] = "gla"
    paper: ClassVar[str] = "arXiv:2312.06635"
    published = {
        "source": "fla/layers/gla.py of fla-org/flash-linear-attention",
        "layer": {"conv": 0, "features": "raw", "low_rank_bias": True, "output_gate": "silu"},
    }

    transition: Transition = DIAGONAL
    g: Gate = knob(gates.gla_decay(), gates.gla_decay(tau=1), gates.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)
