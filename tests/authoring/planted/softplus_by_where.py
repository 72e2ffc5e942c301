"""Planted bug: a softplus by `where`, whose gradient at large arguments is inf * 0."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@parameterization
def softplus_decay() -> Gate:
    """g = -softplus(W x), which is linear from 20 on."""
    return Gate(
        per="token",
        low=-torch.inf,
        high=0.0,
        value=lambda z, p: -torch.where(z > 20, z, z.exp().log1p()),
    )


@dataclass(frozen=True, kw_only=True)
class SoftplusByWhere(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_softplus_by_where"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(softplus_decay(), forms.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)
