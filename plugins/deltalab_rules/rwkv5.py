"""RWKV-5 (Eagle): a learned decay for each channel, and a bonus for the token that is being read."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@parameterization
def rwkv5_decay(low: float = -6.0, high: float = -1.0) -> Gate:
    """g = -exp(c), a learned log-decay for each head and channel; c starts as a ramp over the channels of a head."""
    return Gate(
        per="head_channel",
        low=-torch.inf,
        high=0.0,
        parameters={"log": lambda shape, generator: torch.linspace(low, high, shape[-1]).expand(shape).clone()},
        value=lambda z, p: z - p["log"].exp(),
    )


@dataclass(frozen=True, kw_only=True)
class RWKV5(UpdateRule):
    """o_t = scale (S_{t-1} + (u * k_t) v_t^T)^T q_t
    S_t = diag(alpha) S_{t-1} + k_t v_t^T,   alpha = exp(g)

    Peng et al. 2024 (arXiv:2404.05892, Section 4.1, with r as q): the state alone, without token shift. rwkv6 with a
    decay that does not depend on the token. u is learned for each head and channel.
    """

    name: ClassVar[str] = "rwkv5"
    paper: ClassVar[str] = "arXiv:2404.05892"

    transition: Transition = Transition(name="rwkv5", decay="diagonal", output="before")
    g: Gate = knob(rwkv5_decay(), gates.retnet_decay())
    u: Gate = knob(gates.head_channel(init=0.5), gates.const(1), gates.const(0))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, u: Tensor) -> Operands:
        u = u if u.dim() > 1 else u[:, None]
        return Operands(r=q, k=k, u=v, g=g, bonus=(q * u * k).sum(-1))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, u: Tensor
    ) -> tuple[Tensor, State]:
        (S,) = state
        g, u = (x if x.dim() > 1 else x[:, None] for x in (g, u))
        written = k[..., None] * v[..., None, :]
        o = scale * torch.einsum("bhk,bhkv->bhv", q, S + u[..., None] * written)
        return o, (g.exp()[..., None] * S + written,)
