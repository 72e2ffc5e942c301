"""HGRN2: what is forgotten is what is written, channel by channel."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DIAGONAL, Transition


@dataclass(frozen=True, kw_only=True)
class HGRN2(UpdateRule):
    """S_t = diag(alpha_t) S_{t-1} + (1 - alpha_t) v_t^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t).

    The key is 1 - alpha_t and has no projection of its own: k is not read. Qin et al. 2024 (arXiv:2404.07904),
    without the lower bounds that alpha has there, rising from layer to layer.
    """

    name: ClassVar[str] = "hgrn2"
    paper: ClassVar[str] = "arXiv:2404.07904"
    published = {
        "source": "fla/layers/hgrn2.py of fla-org/flash-linear-attention",
        "layer": {"conv": 0, "features": "silu_qk", "output_norm": "rms_all", "output_gate": False},
        "lacks": "lower bounds of alpha, learned and rising from layer to layer",
    }

    transition: Transition = DIAGONAL
    g: Gate = knob(gates.metala_decay(), gates.gla_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=-torch.expm1(g).expand(k.shape), u=v, g=g)
