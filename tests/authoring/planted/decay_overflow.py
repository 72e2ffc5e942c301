"""Planted bug: the kernel splits exp(G_i - G_j) into exp(G_i) exp(-G_j), which is 0 * inf at g = -1000."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY, Transition


@dataclass(frozen=True, kw_only=True)
class DecayOverflow(UpdateRule):
    name: ClassVar[str] = "planted_decay_overflow"
    paper: ClassVar[str] = "none"

    transition: Transition = DECAY
    g: Gate = knob(gates.mamba2_decay())

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, g=g)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        assert isinstance(state, Tensor)
        total = gates["g"].to(state.dtype).cumsum(1).transpose(1, 2)[..., None]
        q, k, v = (x.to(state.dtype).transpose(1, 2) for x in (q, k, v))
        q, k = q * total.exp(), k * (-total).exp()
        o = scale * (q @ state + (q @ k.transpose(-1, -2)).tril() @ v)
        return o.transpose(1, 2), total[:, :, -1:].exp() * (state + k.transpose(-1, -2) @ v)
