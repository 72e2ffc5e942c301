"""Planted bug: the initial state has the dtype of the inputs, which may be bf16."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab.rule import Operands, State, UpdateRule
from deltalab.structure import ADDITIVE, Transition


@dataclass(frozen=True, kw_only=True)
class SmallState(UpdateRule):
    name: ClassVar[str] = "planted_small_state"
    paper: ClassVar[str] = "none"

    transition: Transition = ADDITIVE

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v)
