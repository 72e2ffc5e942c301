"""Mamba-3: a second-order discretization that writes two tokens at a time, and a complex state as a rotation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import pi
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.passes import Passes, Run
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import DECAY

TWO_WRITES = replace(DECAY, name="trapezoidal", steps=2)


@parameterization
def step_size(dt_min: float = 0.001, dt_max: float = 0.1) -> Gate:
    """Delta = softplus(W x + c), where softplus(c) starts log-uniform in [dt_min, dt_max]."""
    step = gates.mamba2_decay(dt_min=dt_min, dt_max=dt_max)
    return replace(
        step,
        low=0.0,
        high=torch.inf,
        parameters={"dt_bias": step.parameters["dt_bias"]},
        value=lambda z, p: F.softplus(z + p["dt_bias"]),
    )


@parameterization
def rate() -> Gate:
    """-A = softplus(W x), a decay rate that depends on the token, at least 1e-4."""
    return Gate(per="token", low=1e-4, high=torch.inf, value=lambda z, p: F.softplus(z).clamp_min(1e-4))


@parameterization
def angular_velocity(pairs: float = 2) -> Gate:
    """theta = pi tanh(W x), one for each pair of key channels, at most K / 2 pairs. The paper has K / 4 or K / 2."""
    if pairs < 1 or pairs != int(pairs):
        raise InputError(f"angular_velocity.pairs must be a whole number of at least 1, not {pairs:g}")
    return Gate(per="slot", slots=int(pairs), low=-pi, high=pi, value=lambda z, p: pi * z.tanh())


@parameterization
def shared_angular_velocity(pairs: float = 2) -> Gate:
    """theta = pi tanh(W x), one for each pair of key channels, which all heads share, as in the authors' code."""
    return replace(angular_velocity(pairs), one_projection=True)


@parameterization
def heavy_tailed_rate() -> Gate:
    """-A = 1 + z where z = W x is not negative, else 1 / (1 - z), at least 1e-4: the rate of the authors' code."""
    return Gate(
        per="token",
        low=1e-4,
        high=torch.inf,
        value=lambda z, p: (z.clamp_min(0) + 1 / (1 - z.clamp_max(0))).clamp_min(1e-4),
    )


@parameterization
def rank_shares(ranks: float = 2) -> Gate:
    """A learned factor for each rank and channel of a head's value, which starts at 1 / ranks."""
    if ranks < 1 or ranks != int(ranks):
        raise InputError(f"rank_shares.ranks must be a whole number of at least 1, not {ranks:g}")
    return Gate(
        per="head_value_slot",
        slots=int(ranks),
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.full(shape, 1 / ranks)},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class Mamba3(UpdateRule):
    """h_t = alpha_t h_{t-1} + (1 - lambda_t) Delta_t alpha_t B_{t-1} v_{t-1}^T + lambda_t Delta_t B_t v_t^T
    o_t = scale h_t^T C_t,   alpha_t = exp(-Delta_t a_t)
    B_t = R_t (norm(k_t) + b),   C_t = R_t (norm(q_t) + c),   R_t turns pair p by phi_tp
    phi_t = phi_{t-1} + Delta_t theta_t

    Lahoti et al. 2026 (arXiv:2603.15569), SISO: the exponential-trapezoidal rule (Prop. 1), and a complex state as a
    rotation of B and C that depends on the data (Prop. 4). lambda is `lam`; a is -A. norm divides by the root mean
    square, without weights; normalize: false leaves it to the layer, whose `qk_norm` has weights. b and c are learned
    for each head and channel. The skip D x is the layer's, and so is the convolution, which they drop (`conv: 0`). phi
    in [0, 2 pi) and the last B and v are carried from token to token. lam: const(1) takes the trapezoid away: Mamba-2's
    rule, with one write per token. theta: const(0) is the real state, and shared_angular_velocity is one for all heads.
    Ours turns channels p and p + pairs where theirs turns neighbours: a permutation of the channels.

    Costs what sgla costs with two rows per token; with lam const(1), with one.
    """

    name: ClassVar[str] = "mamba3"
    paper: ClassVar[str] = "arXiv:2603.15569"
    published = {
        "source": "mamba_ssm/modules/mamba3.py of state-spaces/mamba, SISO",
        "knobs": {"a": "heavy_tailed_rate", "theta": "shared_angular_velocity", "normalize": False},
        "layer": {
            "conv": 0, "qk_heads": 1, "qk_norm": True, "scale": 1.0, "skip": True, "output_norm": False,
            "output_gate": "silu",
        },
        "lacks": "K / 4 pairs of channels that turn: their number is the option pairs of theta, 2 as it stands, a size",
    }  # fmt: skip

    dt: Gate = knob(step_size())
    a: Gate = knob(rate(), gates.const(1), heavy_tailed_rate())
    lam: Gate = knob(gates.sigmoid(), gates.const(1))
    theta: Gate = knob(angular_velocity(), gates.const(0), shared_angular_velocity())
    b: Gate = knob(gates.head_channel(init=1), gates.const(0))
    c: Gate = knob(gates.head_channel(init=1), gates.const(0))
    normalize: bool = knob(True, False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "transition", DECAY if self.lam.constant else TWO_WRITES)

    @property
    def steps(self) -> int:
        return 1

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def carried(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        dtype = torch.promote_types(v.dtype, torch.float32)
        widths = [self.theta.slots] * (not self.theta.constant) + [k.shape[-1], v.shape[-1]] * (not self.lam.constant)
        return tuple(v.new_zeros(v.shape[0], v.shape[2], width, dtype=dtype) for width in widths)

    def operands(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dt: Tensor,
        a: Tensor,
        lam: Tensor,
        theta: Tensor,
        b: Tensor,
        c: Tensor,
        carry: tuple[Tensor, ...],
    ) -> Operands:
        dtype, exact = q.dtype, not self.theta.constant
        q, k, v, turned = *self._biased(dt, q, c, k, b), v.to(dt.dtype), []
        if not self.theta.constant:
            # In fp32 the sum of 16,000 angles would be off by 1e-4 and more.
            phase = _wrapped(carry[0][:, None] + (dt.double()[..., None] * theta).cumsum(1)).to(dt.dtype)
            q, k, turned = _turned(q, phase, dtype), _turned(k, phase, dtype), [phase[:, -1]]
        g = -dt * a
        if self.lam.constant:
            return Operands(r=q, k=k, u=v, g=g, beta=dt, carry=tuple(turned), exact_gradients=exact)
        last_k, last_v = (torch.cat([last[:, None], x[:, :-1]], 1) for last, x in zip(carry[-2:], (k, v), strict=True))
        return Operands(
            r=q,
            k=_interleaved(last_k, k),
            u=_interleaved(last_v, v),
            g=_interleaved(g, torch.zeros_like(g)),
            beta=_interleaved((1 - lam) * dt * g.exp(), lam * dt),
            carry=(*turned, k[:, -1], v[:, -1]),
            exact_gradients=exact,
        )

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        dt: Tensor,
        a: Tensor,
        lam: Tensor,
        theta: Tensor,
        b: Tensor,
        c: Tensor,
    ) -> tuple[Tensor, State]:
        S, *carry = state
        turned: list[Tensor] = []
        q, k = self._biased(dt, q, c, k, b)
        if not self.theta.constant:
            turned = [_wrapped(carry[0] + dt[..., None] * theta)]
            q, k = _turned(q, turned[0]), _turned(k, turned[0])
        alpha, dt, lam = (x[..., None, None] for x in ((-dt * a).exp(), dt, lam))
        S = alpha * S + lam * dt * k[..., None] * v[..., None, :]
        if not self.lam.constant:
            S = S + (1 - lam) * dt * alpha * carry[-2][..., None] * carry[-1][..., None, :]
            turned += [k, v]
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S, *turned)

    def _biased(self, dt: Tensor, q: Tensor, c: Tensor, k: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """q and k in dt's dtype with their biases added, and before that a root mean square of 1 if `normalize`."""
        c, b = (bias if bias.dim() > 1 else bias[:, None] for bias in (c, b))
        q, k = q.to(dt.dtype), k.to(dt.dtype)
        if self.normalize:
            q, k = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() for x in (q, k))
        return q + c, k + b


@dataclass(frozen=True, kw_only=True)
class Mamba3MIMO(Passes):
    """h_t = alpha_t h_{t-1} + sum_r (past_t B_{t-1,r} v_{t-1,r}^T + now_t B_{t,r} v_{t,r}^T)
    o_t = scale sum_r w_r * h_t^T C_{t,r},   v_{t,r} = m_r * v_t,   alpha_t = exp(-Delta_t a_t)
    past_t = (1 - lambda_t) Delta_t alpha_t,   now_t = lambda_t Delta_t
    B_{t,r} = R_t (norm(k_{t,r}) + b_r),   C_{t,r} = R_t (norm(q_{t,r}) + c_r),   R_t turns pair p by phi_tp

    Lahoti et al. 2026 (arXiv:2603.15569), MIMO of rank n: `mamba3` with n writes and n reads for each token, at a state
    with one n-th of the key channels. The channels of q and k are those of the n ranks one after the other, so that n
    divides K. m and w are learned for each head, rank and channel (`mimo_x` and `mimo_o` of the authors' code), and
    start at 1 / n. Their code gates each rank by SiLU(z_r * z), with z_r starting at 1; here the layer gates the sum.

    Costs n rows of two steps for each token, with K / n key channels.
    """

    name: ClassVar[str] = "mamba3_mimo"
    paper: ClassVar[str] = "arXiv:2603.15569"
    published = {
        "source": "mamba_ssm/modules/mamba3.py of state-spaces/mamba, MIMO",
        "knobs": {"a": "heavy_tailed_rate", "theta": {"shared_angular_velocity": {"pairs": 1}}},
        "layer": {
            "conv": 0, "qk_heads": 1, "scale": 1.0, "skip": True, "output_norm": False, "output_gate": "silu",
        },
        "lacks": "z_r, the learned factors of the gate for each rank, 1 at the start; the weights of the norms of B "
        "and C; and w_r m_r in the skip, where D v stands here. Ranks, 4 there, and pairs of channels are sizes",
    }  # fmt: skip

    dt: Gate = knob(step_size())
    a: Gate = knob(rate(), heavy_tailed_rate())
    lam: Gate = knob(gates.sigmoid())
    theta: Gate = knob(angular_velocity(pairs=1), shared_angular_velocity(pairs=1))
    b: Gate = knob(gates.head_channel(init=1))
    c: Gate = knob(gates.head_channel(init=1))
    m: Gate = knob(rank_shares(), rank_shares(ranks=1))
    w: Gate = knob(rank_shares(), rank_shares(ranks=1))

    def __post_init__(self) -> None:
        if self.m.slots != self.w.slots:
            raise InputError(f"mamba3_mimo: m and w must have as many ranks, not {self.m.slots} and {self.w.slots}")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def key_width(self, key_dim: int) -> int:
        return key_dim // self.m.slots

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        key_dim, value_dim = k.shape[-1], v.shape[-1]
        if key_dim % self.m.slots:
            raise InputError(f"mamba3_mimo: m.ranks {self.m.slots} must divide the key channels of a head, {key_dim}")
        dtype = torch.promote_types(v.dtype, torch.float32)
        shapes = (self.key_width(key_dim), value_dim), (self.theta.slots,), (key_dim,), (value_dim,)
        return tuple(v.new_zeros(v.shape[0], v.shape[2], *shape, dtype=dtype) for shape in shapes)

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        S, phase, last_k, last_v = state
        dt, lam, g = gates["dt"], gates["lam"], -gates["dt"] * gates["a"]
        phase, dtype = (
            _wrapped(phase[:, None] + (dt.double()[..., None] * gates["theta"]).cumsum(1)).to(dt.dtype),
            q.dtype,
        )
        q, k = self._by_rank(q, gates["c"], phase, dtype), self._by_rank(k, gates["b"], phase, dtype)
        v = v.to(dt.dtype)
        keys = torch.cat([last_k[:, None], k.flatten(-2)], 1).unflatten(-1, k.shape[-2:])
        values = torch.cat([last_v[:, None], v], 1)[..., None, :] * self._shares(gates["m"])
        # A step of the past and a step of the present for each rank: [B, T, H, n, 2, ...].
        steps = [torch.stack([x[:, :-1], x[:, 1:]], dim=4) for x in (keys, values)]
        strength = torch.stack([(1 - lam) * dt * g.exp(), lam * dt], dim=-1)[:, :, :, None].expand(steps[0].shape[:-1])
        decay = torch.zeros_like(strength)
        decay[:, :, :, 0, 0] = g
        write_k, write_v, beta, decays = (x.movedim(2, 4).flatten(1, 3) for x in (*steps, strength, decay))
        o, (S,) = run(
            TWO_WRITES,
            Operands(
                r=q.transpose(2, 3).flatten(1, 2), k=write_k, u=write_v, g=decays, beta=beta, exact_gradients=True
            ),
            state=(S,),
        )
        o = o.to(dt.dtype).unflatten(1, (-1, self.m.slots)).transpose(2, 3)
        # The read of a rank lacks the writes of the ranks after it.
        for step in range(2):
            later = (q @ steps[0][..., step, :].mT).triu(1) * strength[:, :, :, None, :, step]
            o = o + later @ steps[1][..., step, :]
        o = scale * (o * self._shares(gates["w"])).sum(-2)
        return o, (S, phase[:, -1], k.flatten(-2)[:, -1], v[:, -1])

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, **gates: Tensor
    ) -> tuple[Tensor, State]:
        S, phase, last_k, last_v = state
        dt, lam = gates["dt"], gates["lam"]
        phase, alpha = _wrapped(phase + dt[..., None] * gates["theta"]), (-dt * gates["a"]).exp()
        q, k = self._by_rank(q, gates["c"], phase), self._by_rank(k, gates["b"], phase)
        S = alpha[..., None, None] * S
        for strength, keys, value in (
            ((1 - lam) * dt * alpha, last_k.unflatten(-1, k.shape[-2:]), last_v),
            (lam * dt, k, v),
        ):
            shared = value[..., None, :] * self._shares(gates["m"])
            S = S + strength[..., None, None] * torch.einsum("bhrk,bhrv->bhkv", keys, shared)
        o = torch.einsum("bhrk,bhkv->bhrv", q, S) * self._shares(gates["w"])
        return scale * o.sum(-2), (S, phase, k.flatten(-2), v)

    def _by_rank(self, x: Tensor, bias: Tensor, phase: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [.., H, K] with a root mean square of 1 in each rank, biased and turned, [.., H, n, K / n].

        A dtype is that of `_turned`.
        """
        x, bias = (y.to(phase.dtype).unflatten(-1, (self.m.slots, -1)) for y in (x, bias))
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return _turned(x + bias, phase[..., None, :].expand(*x.shape[:-1], -1), dtype)

    def _shares(self, share: Tensor) -> Tensor:
        """A gate's factors [H, V n] as [H, n, V]."""
        shares: Tensor = share.unflatten(-1, (-1, self.m.slots))
        return shares.mT


def _wrapped(phase: Tensor) -> Tensor:
    """The phase in [0, 2 pi)."""
    return phase.remainder(2 * pi)


def _turned(x: Tensor, phase: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x [.., K] with channels p and p + pairs turned by phase [.., pairs], as many pairs as fit; the rest stays.

    With a dtype, turned channels are rounded to it, as kernels round them. The gradient of a phase is a sum over later
    tokens, in which what is read and what is written cancel only if it is taken with these numbers.
    """
    pairs = min(phase.shape[-1], x.shape[-1] // 2)
    one, other, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = phase[..., :pairs].cos(), phase[..., :pairs].sin()
    if dtype not in (None, x.dtype):
        with torch.no_grad():  # What the rounded numbers are before the turn.
            a, b = (y.to(dtype).to(x.dtype) for y in (cos * one - sin * other, sin * one + cos * other))
            moved, moved_too = cos * a + sin * b - one, cos * b - sin * a - other
        one, other = one + moved, other + moved_too
    return torch.cat([cos * one - sin * other, sin * one + cos * other, rest], dim=-1)


def _interleaved(first: Tensor, second: Tensor) -> Tensor:
    """Two rows for each token, [B, T, ...] twice to [B, 2 T, ...]."""
    return torch.stack([first, second], dim=2).flatten(1, 2)
