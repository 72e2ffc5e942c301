"""Mamba: a selective scan, whose step size says both how much is forgotten and how much is written."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DIAGONAL, Transition


@parameterization
def selective_step(dt_min: float = 0.001, dt_max: float = 0.1, rank: float = 16) -> Gate:
    """Delta = softplus(W_1 W_2 x + c), the step size of Mamba (arXiv:2312.00752, Section 3.6).

    softplus(c) starts log-uniform in [dt_min, dt_max], as in Mamba2.
    """
    step = gates.mamba2_decay(dt_min=dt_min, dt_max=dt_max)
    return replace(
        step,
        low=0.0,
        high=torch.inf,
        rank=int(rank),
        parameters={"dt_bias": step.parameters["dt_bias"]},
        value=lambda z, p: F.softplus(z + p["dt_bias"]),
    )


@parameterization
def s4d_real() -> Gate:
    """-A, a rate learned as exp(b) for each head and channel of the key; it starts at 1, 2, .. K (S4D-Real)."""
    return Gate(
        per="head_channel",
        low=0.0,
        high=torch.inf,
        parameters={"log": lambda shape, generator: torch.arange(1, shape[-1] + 1).log().expand(shape).clone()},
        value=lambda z, p: z + p["log"].exp(),
    )


@dataclass(frozen=True, kw_only=True)
class Mamba(UpdateRule):
    """S_t = diag(exp(Delta_t A)) S_{t-1} + Delta_t k_t v_t^T,   o_t = scale S_t^T q_t,   A = -a

    Gu and Dao 2023 (arXiv:2312.00752, Algorithm 2), with B as k, C as q and x as v. A head of ours is a channel of
    theirs: Delta and A belong to a head, and the two agree where a head has one value channel (value_dim 1, as many
    heads as channels, `shared_qk`, since theirs share B and C). With more, a head's value channels share Delta and A.
    The skip D x is not a part of the recurrence and is left out. q and k keep their norm. dt: const(1) makes it linear
    and time-invariant, an S4D. a: const(1) lets all channels of the key forget alike, as Mamba2 does.

    Costs what gla costs; with value_dim 1 most of the kernels' work is padding.
    """

    name: ClassVar[str] = "mamba"
    paper: ClassVar[str] = "arXiv:2312.00752"

    transition: Transition = DIAGONAL
    dt: Gate = knob(selective_step(), gates.const(1))
    a: Gate = knob(s4d_real(), gates.const(1))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, dt: Tensor, a: Tensor) -> Operands:
        a = a if a.dim() > 1 else a[:, None]
        return Operands(r=q, k=k, u=v, g=(-dt[..., None] * a).expand(k.shape), beta=dt)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, dt: Tensor, a: Tensor
    ) -> tuple[Tensor, State]:
        (S,) = state
        dt, a = dt[..., None, None], a[..., None] if a.dim() > 1 else a[:, None, None]
        S = (-dt * a).exp() * S + dt * k[..., None] * v[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S,)
