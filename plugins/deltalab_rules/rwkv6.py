"""RWKV-6: a decay for each channel that depends on the token, and a bonus for the token that is being read."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import Transition


@parameterization
def rwkv6_decay(rank: float = 16) -> Gate:
    """g = -exp(W_1 W_2 x + c), so alpha = exp(-exp(.)) in (0, 1); c starts uniform in [-6, -1].

    Peng et al. 2024 (arXiv:2404.05892, Section 4.2), who have a tanh between W_1 and W_2.
    """
    return Gate(
        per="channel",
        low=-torch.inf,
        high=0.0,
        rank=int(rank),
        parameters={"bias": lambda shape, generator: torch.empty(shape).uniform_(-6.0, -1.0, generator=generator)},
        value=lambda z, p: -(z + p["bias"]).exp(),
    )


@dataclass(frozen=True, kw_only=True)
class RWKV6(UpdateRule):
    """o_t = scale (S_{t-1} + (u * k_t) v_t^T)^T q_t
    S_t = diag(alpha_t) S_{t-1} + k_t v_t^T,   alpha_t = exp(g_t)

    Peng et al. 2024 (arXiv:2404.05892, Section 4.2, with r as q): the state alone, without token shift. The output
    reads the state before the token's write, and the token itself through u, learned for each head and channel.
    u: const(0) leaves the token out of its own output, const(1) reads it as later tokens do.

    Costs what gla costs, and one row more for each sequence.
    """

    name: ClassVar[str] = "rwkv6"
    paper: ClassVar[str] = "arXiv:2404.05892"

    transition: Transition = Transition(name="rwkv6", decay="diagonal", output="before")
    g: Gate = knob(rwkv6_decay(), gates.gla_decay())
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
        u = u if u.dim() > 1 else u[:, None]
        written = k[..., None] * v[..., None, :]
        o = scale * torch.einsum("bhk,bhkv->bhv", q, S + u[..., None] * written)
        return o, (g.exp()[..., None] * S + written,)
