"""DeltaNet: each write replaces what the state held for its key."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class DeltaNet(UpdateRule):
    """S_t = (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = scale S_t^T q_t.

    The eigenvalue along k_t is 1 - beta_t: in [0, 1] for beta in [0, 1]; in [-1, 1] for beta in [0, 2], which
    parity needs (Grazzi et al. 2024, arXiv:2411.12537). Yang et al. 2024 (arXiv:2406.06484).
    """

    name: ClassVar[str] = "deltanet"
    paper: ClassVar[str] = "arXiv:2406.06484"
    published = {
        "source": "fla/layers/delta_net.py of fla-org/flash-linear-attention",
        "layer": {"output_gate": False},
    }

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(gates.sigmoid(max=1), gates.sigmoid(max=2))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (1 - self.beta.high, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, beta=beta, e=beta)
