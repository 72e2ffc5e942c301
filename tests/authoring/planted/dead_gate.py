"""Planted bug: p = b k is normalized, which cancels b. In FLA's Comba the gradient of b was 1e-7."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import SPLR, Transition


@dataclass(frozen=True, kw_only=True)
class DeadGate(UpdateRule):
    name: ClassVar[str] = "planted_dead_gate"
    paper: ClassVar[str] = "none"

    transition: Transition = SPLR
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.sigmoid())
    b: Gate = knob(gates.head_sigmoid(), gates.const(1))

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, b: Tensor) -> Operands:
        p = F.normalize(b[..., None] * k, dim=-1)
        return Operands(r=q, k=k, u=beta[..., None] * v, g=g, e=beta * (p * k).sum(-1))
