"""Mamba2: a scalar decay and a step size from one projection."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class Mamba2(UpdateRule):
    """S_t = alpha_t S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t).

    g_t = -a softplus(W x_t + c) and beta_t = softplus(W x_t + c) share W and c: what forgets little writes little.
    q, k and v have SiLU and no norm, and the scale is 1, as in their layer. Their skip D v, the bias of their
    convolution and q and k shared by all heads are settings of the layer: `mamba2@published` has them.
    Dao and Gu 2024 (arXiv:2405.21060), in the notation of arXiv:2506.02475, Tables 1 and 5.
    """

    name: ClassVar[str] = "mamba2"
    paper: ClassVar[str] = "arXiv:2405.21060"
    published = {
        "source": "mamba_ssm/modules/mamba2.py of state-spaces/mamba",
        "layer": {
            "qk_heads": 1, "conv_bias": True, "skip": True,
            "output_norm": "rms_all", "output_gate": "silu_before_norm",
        },
    }  # fmt: skip

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.mamba2_step(), gates.sigmoid(), gates.const(1))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "silu"

    def scale(self, key_dim: int) -> float:
        return 1.0

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, g=g)
