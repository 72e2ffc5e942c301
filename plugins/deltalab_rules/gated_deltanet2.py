"""Gated DeltaNet-2: channels of the key erase, and channels of the value write, each by a gate of its own."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet2(UpdateRule):
    """S_t = (I - k_t (b_t * k_t)^T) diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T,   alpha_t = exp(g_t)
    o_t = scale S_t^T q_t

    "Gated DeltaNet-2: decoupling erase and write in linear attention" (arXiv:2605.22791), in the form of FLA's layer:
    b is an erase gate for each channel of the key, w a write gate for each channel of the value. With one number for
    both it is `kda`. b and w: sigmoid has one number for each head. The eigenvalues are real: with P = diag(b alpha),
    the transition is similar to diag(alpha) - P^(1/2) k k^T P^(1/2).

    Costs what kda costs with an erasing key of its own, and two gates of K and V numbers.
    """

    name: ClassVar[str] = "gated_deltanet2"
    paper: ClassVar[str] = "arXiv:2605.22791"
    published = {
        "source": "fla/layers/gdn2.py of fla-org/flash-linear-attention",
        "knobs": {"g": "kda_decay", "b": "full_channel_sigmoid", "w": "full_value_sigmoid"},
        "layer": {"gate_rank": 0, "low_rank_bias": True},
    }

    transition: Transition = Transition(name="gdn2", decay="diagonal", low_rank="free", reads="decayed_state")
    g: Gate = knob(gates.mamba2_decay(), gates.gla_decay(), gates.kda_decay())
    b: Gate = knob(gates.channel_sigmoid(), gates.sigmoid(), gates.sigmoid(max=2), gates.full_channel_sigmoid())
    w: Gate = knob(gates.value_sigmoid(), gates.sigmoid(), gates.const(1), gates.full_value_sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (1 - self.b.high, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, b: Tensor, w: Tensor) -> Operands:
        b = b if self.b.per == "channel" else b[..., None]
        w = w if self.w.per == "value_channel" else w[..., None]
        return Operands(r=q, k=k, u=w * v, g=g, a=-k, b=b * k)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, b: Tensor, w: Tensor
    ) -> tuple[Tensor, State]:
        b = b if self.b.per == "channel" else b[..., None]
        w = w if self.w.per == "value_channel" else w[..., None]
        S = g.exp()[..., None] * state[0]
        S = S + k[..., None] * (w * v - torch.einsum("bhk,bhkv->bhv", b * k, S))[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)
