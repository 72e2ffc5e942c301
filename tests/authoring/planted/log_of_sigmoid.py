"""Planted bug: log(sigmoid(z)) is -inf in fp32 from z = -104 on, and its gradient nan."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@parameterization
def log_of_sigmoid() -> Gate:
    """g = log sigmoid(W x)."""
    return Gate(per="token", low=-torch.inf, high=0.0, value=lambda z, p: z.sigmoid().log())


@dataclass(frozen=True, kw_only=True)
class LogOfSigmoid(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_log_of_sigmoid"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(log_of_sigmoid())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)
