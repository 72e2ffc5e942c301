"""RetNet and Lightning attention: a decay that no input moves."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class RetNet(UpdateRule):
    """S_t = alpha S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t,   alpha = exp(g), one for each head and fixed.

    Sun et al. 2023 (arXiv:2307.08621); the slopes of Lightning attention, Qin et al. 2024 (arXiv:2405.17381), as a
    knob. The state alone: without xpos, and with unit-norm SiLU features.
    """

    name: ClassVar[str] = "retnet"
    paper: ClassVar[str] = "arXiv:2307.08621"
    published = {
        "source": "fla/layers/multiscale_retention.py of fla-org/flash-linear-attention",
        "layer": {"conv": 0, "features": "raw", "rope": True, "output_gate": "silu"},
    }

    transition: Transition = DECAY
    g: Gate = knob(gates.retnet_decay(), gates.lightning_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)
