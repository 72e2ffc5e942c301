"""Kalman linear attention: a Kalman filter per channel, whose precision decides how much is forgotten and written."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DIAGONAL, Transition

LEAST = 1e-8
"""The least precision by which a write is divided: a channel whose keys are all 0 has none."""

NONE = 1e-30
"""What stands for the precision before the first token, 0, where something is divided by it."""


FLOOR = 1e-4
"""The least rate, noise and step: without noise the precision would grow without end."""


def _positive(low: float, high: float, start: gates.Start) -> Gate:
    """FLOOR + softplus(c), with a learned c for each channel of each head, starting as `start` draws it."""
    if not FLOOR < low <= high:
        raise InputError(f"a start takes {FLOOR:g} < low <= high, not {low:g} and {high:g}")
    return Gate(
        per="head_channel",
        low=FLOOR,
        high=math.inf,
        parameters={"c": lambda shape, generator: (start(shape, generator).double() - FLOOR).expm1().log().float()},
        value=lambda z, p: FLOOR + F.softplus(z + p["c"]),
    )


@parameterization
def spread(low: float = 0.5, high: float = 8.0) -> Gate:
    """A learned positive number for each channel; the channels of a head start spread in [low, high], evenly in log."""
    return _positive(
        low, high, lambda shape, generator: torch.logspace(math.log10(low), math.log10(high), shape[-1]).expand(shape)
    )


@parameterization
def drawn(low: float, high: float) -> Gate:
    """A learned positive number for each channel, whose start is log-uniform in [low, high]."""

    def start(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp()

    return _positive(low, high, start)


@parameterization
def confidence() -> Gate:
    """softplus(W x) + 1e-4: the precision of the token as an observation."""
    return Gate(per="token", low=1e-4, high=math.inf, value=lambda z, p: F.softplus(z) + 1e-4)


@dataclass(frozen=True, kw_only=True)
class KalmanLinearAttention(UpdateRule):
    """c_t = P_{t-1} / (abar^2 + pbar P_{t-1}),   P_t = c_t + lam_t k_t^2                    (by channel)
    S_t = diag(abar c_t / P_t) S_{t-1} + lam_t (k_t / P_t) v_t^T,   o_t = scale S_t^T q_t
    abar = exp(-a dt),   pbar = p^2 (1 - exp(-2 a dt)) / (2 a)

    Shaj et al. 2026 (arXiv:2602.10743): each channel of the state is an Ornstein-Uhlenbeck process that tokens observe,
    and S is its mean given them, P its precision, in the information form, where P moves by a fraction whose
    coefficients multiply as matrices of 2 x 2. So P has a parallel form, and S is a state with diagonal decay. Theirs
    has a precision lam for each channel of v, so that P is as large as S; here a token and head have one. a, p and dt
    are learned for each channel. p starts at 1: theirs starts at 0.01, where it hardly acts at first. P is carried from
    token to token. `kalman` is the filter with a full covariance, without forgetting.

    Costs what gla costs, and a scan of 4 K numbers over log2(T) rounds, in fp64.
    """

    name: ClassVar[str] = "kalman_linear_attention"
    paper: ClassVar[str] = "arXiv:2602.10743"

    transition: Transition = DIAGONAL
    lam: Gate = knob(confidence(), gates.const(1))
    a: Gate = knob(spread(), gates.const(1))
    p: Gate = knob(drawn(1, 1), gates.const(1))
    dt: Gate = knob(drawn(0.001, 0.1), gates.const(0.1))

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return (k.new_zeros(k.shape[0], *k.shape[2:], dtype=torch.promote_types(k.dtype, torch.float32)),)

    def operands(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        lam: Tensor,
        a: Tensor,
        p: Tensor,
        dt: Tensor,
        carry: tuple[Tensor, ...],
    ) -> Operands:
        (before,), heads = carry, k.shape[2]
        a, p, dt = (x if x.dim() == 2 else x[:, None].expand(heads, k.shape[-1]) for x in (a, p, dt))
        dtype = before.dtype
        # What lam adds to a write and, by the precision, takes from it almost cancels: fp32 would lose the gradient.
        lam = lam.expand(k.shape[:3])[..., None]
        before, exact, lam, a, p, dt = (x.double() for x in (before, k, lam, a, p, dt))
        added = lam * exact.square()
        kept, noise = (-2 * a * dt).exp(), -p.square() * torch.expm1(-2 * a * dt) / (2 * a)
        precision = _precisions(before, kept, noise, added)
        earlier = torch.cat([before[:, None], precision[:, :-1]], dim=1)
        predicted = (earlier / (kept + noise * earlier)).clamp_min(NONE)
        return Operands(
            r=q,
            k=(lam * exact / (predicted + added).clamp_min(LEAST)).to(dtype),
            u=v,
            g=(-a * dt - torch.log1p(added / predicted)).to(dtype),
            carry=(precision[:, -1].to(dtype),),
        )

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        lam: Tensor,
        a: Tensor,
        p: Tensor,
        dt: Tensor,
    ) -> tuple[Tensor, State]:
        S, P = state
        a, p, dt = (x if x.dim() == 2 else x[:, None] for x in (a, p, dt))
        abar, pbar = (-a * dt).exp(), p**2 * (1 - (-2 * a * dt).exp()) / (2 * a)
        predicted = P / (abar**2 + pbar * P)
        P = predicted + lam[..., None] * k**2
        total = P.clamp_min(LEAST)
        S = (abar * predicted / total)[..., None] * S + (lam[..., None] * k / total)[..., None] * v[..., None, :]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S, P)


def _precisions(before: Tensor, kept: Tensor, noise: Tensor, added: Tensor) -> Tensor:
    """P_t = P_{t-1} / (kept + noise P_{t-1}) + added_t for all t, [B, T, H, K], in log2(T) rounds.

    A step is the fraction of the matrix [[1 + noise added, kept added], [noise, kept]], and steps compose as matrices
    multiply. The matrices are positive and known up to a factor, so that they are divided by their largest number.
    """
    m = torch.stack(torch.broadcast_tensors(1 + noise * added, kept * added, noise, kept), dim=-1).unflatten(-1, (2, 2))
    far = 1
    while far < added.shape[1]:
        joined = m[:, far:] @ m[:, :-far]
        m = torch.cat([m[:, :far], joined / joined.detach().amax((-1, -2), keepdim=True)], dim=1)
        far *= 2
    above, below = (m[..., 0] * before[:, None, ..., None] + m[..., 1]).unbind(-1)
    # Both are 0 where no token has observed a channel for so long that the memory of it underflows.
    precisions: Tensor = above / torch.where(below == 0, torch.finfo(below.dtype).tiny, below)
    return precisions
