"""Planted bug: without gradients, keys are rounded to bf16, so that evaluation measures another rule."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class EvaluatesInBF16(UpdateRule):
    """S_t = alpha_t S_{t-1} + k_t v_t^T,   o_t = scale S_t^T q_t."""

    name: ClassVar[str] = "planted_evaluates_in_bf16"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(forms.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        if not torch.is_grad_enabled():
            k = k.bfloat16().to(k.dtype)
        return Operands(r=q, k=k, u=v, g=g)
