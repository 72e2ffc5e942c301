"""Scalar-gated linear attention: RLA's base, a decay and an input gate with unit-norm keys."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class SGLA(UpdateRule):
    """S_t = alpha_t S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t).

    The baseline of "Enhancing linear attention with residual learning" (Section 4.1, Listing 1). silu: which of q, k
    and v get SiLU. normalize: whether q and k have unit norm, as in Section 4.1; Listing 1 does not normalize.
    """

    name: ClassVar[str] = "sgla"
    paper: ClassVar[str] = "Enhancing linear attention with residual learning"

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay(), gates.metala_decay(), gates.const(0))
    beta: Gate = knob(gates.sigmoid(), gates.const(1))
    silu: str = knob("qkv", "qk")
    normalize: bool = knob(True, False)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "unit" if self.normalize else "silu"

    @property
    def silu_of_v(self) -> bool:
        return self.silu == "qkv"

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, g=g)
