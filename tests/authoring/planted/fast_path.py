"""Planted bug: the decay is left out where its mean over all sequences and tokens is small."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class FastPath(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t,   alpha_t = exp(g_t)."""

    name: ClassVar[str] = "planted_fast_path"

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        if g.mean() > -0.02:  # a decay of a few percent is not worth its exponentials
            g = torch.zeros_like(g)
        return Operands(r=q, k=k, u=v, g=g)
