"""Planted bug: the kernel erases from the decayed state, but the rule declares the undecayed one (as FLA's Comba)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import SPLR, Transition


@dataclass(frozen=True, kw_only=True)
class DecayedRead(UpdateRule):
    name: ClassVar[str] = "planted_decayed_read"
    paper: ClassVar[str] = "none"

    transition: Transition = SPLR
    g: Gate = knob(gates.mamba2_decay())
    beta: Gate = knob(gates.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (-1.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=beta[..., None] * v, g=g, e=beta)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        assert isinstance(state, Tensor)
        q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, gates["g"], gates["beta"]))
        out = []
        for t in range(q.shape[1]):
            state = g[:, t, :, None, None].exp() * state
            new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
            state = state + k[:, t, :, :, None] * new[:, :, None, :]
            out.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
        return torch.stack(out, dim=1), state
