"""Planted bug: `step` writes beta v, and `operands` writes v."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import HOUSEHOLDER, Transition


@dataclass(frozen=True, kw_only=True)
class TwoEquations(UpdateRule):
    name: ClassVar[str] = "planted_two_equations"
    paper: ClassVar[str] = "none"

    transition: Transition = HOUSEHOLDER
    beta: Gate = knob(forms.sigmoid())

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, scale: float, state: State
    ) -> tuple[Tensor, State]:
        S = state[0]
        error = v - torch.einsum("bhk,bhkv->bhv", k, S)
        S = S + torch.einsum("bh,bhk,bhv->bhkv", beta, k, error)
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta)
