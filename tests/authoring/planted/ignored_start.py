"""Planted bug: the algebra begins from zeros, whatever `initial_state` returns."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class IgnoredStart(UpdateRule):
    name: ClassVar[str] = "planted_ignored_start"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return (
            torch.ones(
                k.shape[0], k.shape[2], k.shape[3], v.shape[3], dtype=torch.promote_types(v.dtype, torch.float32)
            ),
        )

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)
