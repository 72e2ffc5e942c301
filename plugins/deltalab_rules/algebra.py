"""The algebra itself as one rule: every choice that the contract leaves open is a knob."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import Fit, Operands, Option, UpdateRule, knob
from deltalab.structure import ResidualState, Transition

LEAST = 1e-30
"""The least |alpha| that has a logarithm in fp32."""


@parameterization
def rwkv6_decay(rank: float = 16) -> Gate:
    """g = -exp(W_1 W_2 x + c), so alpha = exp(-exp(.)) in (0, 1); c starts uniform in [-6, -1] (arXiv:2404.05892)."""
    return replace(
        gates.rwkv7_decay(rank=rank), per="channel", low=-math.inf, value=lambda z, p: -(z + p["bias"]).exp()
    )


@parameterization
def selective_step(dt_min: float = 0.001, dt_max: float = 0.1, rank: float = 16) -> Gate:
    """dt = softplus(W_1 W_2 x + c), Mamba's step size; softplus(c) starts log-uniform in [dt_min, dt_max]."""
    return _softplus("token", dt_min, dt_max, rank)


@parameterization
def selection(low: float = 0.001, high: float = 0.1, rank: float = 16) -> Gate:
    """s = softplus(W_1 W_2 x + c), one for each channel of the key; softplus(c) starts log-uniform in [low, high]."""
    return _softplus("channel", low, high, rank)


def _softplus(per: Literal["token", "channel"], low: float, high: float, rank: float) -> Gate:
    return Gate(
        per=per,
        low=0.0,
        high=math.inf,
        rank=int(rank),
        parameters={"bias": gates.mamba2_decay(dt_min=low, dt_max=high).parameters["dt_bias"]},
        value=lambda z, p: F.softplus(z + p["bias"]),
    )


@parameterization
def s4d_real() -> Gate:
    """a = exp(b), a rate learned for each head and channel of the key; it starts at 1, 2, .. K (S4D-Real)."""
    return Gate(
        per="head_channel",
        low=0.0,
        high=math.inf,
        parameters={"log": lambda shape, generator: torch.arange(1, shape[-1] + 1).log().expand(shape).clone()},
        value=lambda z, p: z + p["log"].exp(),
    )


DECAYS, ERASES = ("scalar", "diagonal"), ("tied", "free")
WHEN: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "decay_by": {"decay": ("diagonal",), "low_rank": ("none",)},
    "g": {"decay": DECAYS, "decay_by": ("gate",)},
    "dt": {"decay_by": ("step",)},
    "a": {"decay_by": ("step",)},
    "s": {"decay_by": ("selection",)},
    "tau": {"decay_by": ("selection",)},
    "signed": {"decay": DECAYS, "decay_by": ("gate",), "low_rank": ("none",), "micro_steps": (1,)},
    "reads": {"decay": DECAYS, "low_rank": ERASES},
    "direction": {"low_rank": ("free",)},
    "xi": {"direction": ("kappa",)},
    "w": {"direction": ("w",)},
    "erase": {"low_rank": ERASES},
    "b": {"low_rank": ERASES},
    "b_on": {"low_rank": ("free",), "b": ("channel_sigmoid",)},
    "rho": {"low_rank": ("free",), "b": ("channel_sigmoid",)},
    "reflects": {"low_rank": ERASES},
    "write": {"decay": DECAYS, "decay_by": ("gate",), "signed": (False,)},
    "key": {"decay": ("diagonal",), "write": ("forgotten",), "low_rank": ("none",)},
    "beta": {"decay_by": ("gate", "key", "selection"), "write": ("beta",)},
    "strength": {"low_rank": ("tied",), "erase": ("beta",), "b": ("const",), "reflects": (False,)},
    "read": {"decay": ("scalar",), "signed": (False,), "micro_steps": (1,)},
    "d": {"micro_steps": (1,)},
    "bonus": {"pre_state": (True,)},
    "gamma": {"residual": ("huber", "log_cosh", "l2")},
    "gated": {"gamma": ("sigmoid", "like_beta")},
    "silu_v": {"qk": ("unit", "silu")},
}
"""Where a knob has an effect: where each of these others has one of these values, a gate by its kind.

Elsewhere it stands at its default, g at 0 and beta at 1. Parents stand before their children.
"""

NEEDED = ("g", "dt", "a", "s", "tau", "xi", "w")
"""The gates that are never constant where they have an effect."""


@dataclass(frozen=True, kw_only=True)
class Algebra(UpdateRule):
    """S_t = D_t S_{t-1} + a_t (b_t^T X_{t-1}) + k'_t u_t^T,   X = S_{t-1} or D_t S_{t-1},   o_t = scale S_t^T r_t

    Each knob is a choice of the contract; the default is Gated DeltaNet. `POINTS` has the knobs of the published rules.
    `WHEN` says where a knob has an effect.

    The decay D_t:

    - decay: none; scalar, alpha = exp(g) with one g for each head; diagonal, with one for each channel of the key.
    - decay_by: what sets a diagonal alpha. gate: g. key: alpha = 1 - delta k^2 with delta = beta / (1 + beta |k|^2), as
      in Longhorn, which writes by delta. step: alpha = exp(-dt a), as in Mamba, which writes by dt. selection:
      alpha = exp(-s tau), as in Rodimus, where s^tau scales the key.
    - signed: alpha = 2 exp(g) - 1, which reaches -1.

    The low rank, of strength e:

    - low_rank: tied has a = -e k' and b = k'; free has a = -e x and b = x.
    - direction: x is k; kappa, which is xi * k to unit norm; or w, a vector that the layer projects.
    - erase: e is b beta (beta), or b alone (own). reflects: twice that, for eigenvalues down to -1.
    - b_on: whether a b for each channel scales the x that reads, or the x that is written to.
    - reads: X is the decayed state or the state.

    What is written:

    - write: u = beta v (beta), or 1 - alpha in the place of beta (forgotten). A diagonal 1 - alpha scales the key.
    - key: k' = k. none: k' = 1 - alpha and k has no effect, as in HGRN2. rho: k' = k (1 + (b - 1) rho), as in RWKV-7.
    - strength: beta as it is (euler), or bounded for keys of any norm: exact as in EFLA, or implicit, delta.
    - value: a gate for each channel of v. micro_steps: writes of a token, each with its own k, v and beta, of which the
      first decays.

    What is read:

    - read: r = q, or alpha q (decayed). d: r = q - d k. pre_state: o reads S_{t-1}, and the token itself by its bonus.
    - residual: a second state learns the first one's error by gamma, as in RLA and RDN, and is read by gamma if gated.

    The inputs:

    - qk: q and k have SiLU and unit norm (unit), SiLU (silu), or neither (raw). silu_v: whether v has SiLU too.
    """

    name: ClassVar[str] = "algebra"

    decay: str = knob("scalar", "none", "diagonal")
    decay_by: str = knob("gate", "key", "step", "selection")
    g: Gate = knob(
        gates.mamba2_decay(), gates.gla_decay(), gates.metala_decay(), gates.rwkv7_decay(), rwkv6_decay(),
        gates.retnet_decay(), gates.lightning_decay(), gates.const(0),
    )  # fmt: skip
    dt: Gate = knob(gates.const(1), selective_step())
    a: Gate = knob(gates.const(1), s4d_real())
    s: Gate = knob(gates.const(1), selection())
    tau: Gate = knob(gates.const(1), gates.channel_sigmoid())
    signed: bool = knob(False, True)

    low_rank: str = knob("tied", "none", "free")
    reads: str = knob("decayed_state", "state")
    direction: str = knob("k", "kappa", "w")
    xi: Gate = knob(gates.const(1), gates.head_channel(init=0.85))
    w: Gate = knob(gates.const(1), gates.unit_vector(rank=16))
    erase: str = knob("beta", "own")
    b: Gate = knob(gates.const(1), gates.head_sigmoid(), gates.sigmoid(), gates.sigmoid(max=2), gates.channel_sigmoid())
    b_on: str = knob("read", "write")
    rho: Gate = knob(gates.const(0), gates.head_channel(init=1))
    reflects: bool = knob(False, True)

    write: str = knob("beta", "forgotten")
    key: str = knob("k", "none")
    beta: Gate = knob(gates.sigmoid(), gates.sigmoid(max=2), gates.mamba2_step(), gates.const(1))
    strength: str = knob("euler", "exact", "implicit")
    value: Gate = knob(gates.const(1), gates.value_sigmoid())
    micro_steps: int = knob(1, 2, 3, 4)

    read: str = knob("q", "decayed")
    d: Gate = knob(gates.const(0), gates.head(init=0.02), gates.head(init=1))
    pre_state: bool = knob(False, True)
    bonus: Gate = knob(gates.const(0), gates.const(1), gates.head_channel(init=0.5))
    residual: str = knob("none", "huber", "log_cosh", "l2")
    gamma: Gate = knob(gates.const(1), gates.sigmoid(), gates.like_beta())
    gated: bool = knob(True, False)

    qk: str = knob("unit", "silu", "raw")
    silu_v: bool = knob(True, False)

    def __post_init__(self) -> None:
        for name in WHEN:
            self._settle(name)
        for wrong, why in self._refusals():
            if wrong:
                raise InputError(f"{self.name}: {why}")
        transition = Transition(
            name=f"{self.decay} {self.low_rank}",
            decay=cast(Any, self.decay),
            low_rank=cast(Any, self.low_rank),
            reads=cast(Any, self.reads if self.decay != "none" and self.low_rank != "none" else "state"),
            steps=self.micro_steps,
            output="before" if self.pre_state else "after",
        )
        object.__setattr__(self, "transition", transition)
        if self.micro_steps > 1:
            object.__setattr__(self, "per_step", frozenset({"beta", "b"}))
        if self.key == "none":
            object.__setattr__(self, "ignores", frozenset({"k"}))

    def _settle(self, name: str) -> None:
        """Gives a knob that says nothing the value that it has here. Raises `InputError` for one without effect here.

        Without effect, g is 0 and beta is 1. A gate that is needed here takes its first option that is not constant.
        """
        given, (default, *others) = getattr(self, name), self.options()[name]
        lacking = [parent for parent, allowed in WHEN[name].items() if _word(getattr(self, parent)) not in allowed]
        if not lacking:
            if name in NEEDED and _word(given) == "const":
                if given != default:
                    raise InputError(f"{self.name}.{name} {given} forgets nothing: take decay none")
                object.__setattr__(self, name, others[0])
            return
        rest = others[-1] if name in ("g", "beta") else default
        if given == default:
            object.__setattr__(self, name, rest)
        elif given != rest:
            parent, value = lacking[0], _word(getattr(self, lacking[0]))
            allowed = " or ".join(map(str, WHEN[name][parent]))
            raise InputError(f"{self.name}.{name} {given} takes {parent} {allowed}, not {value}")

    def _refusals(self) -> list[tuple[bool, str]]:
        """What the algebra cannot express or keep stable, each with the reason."""
        erases, steps = self.low_rank != "none", self.micro_steps > 1
        along_k = self.low_rank == "tied" or (self.low_rank == "free" and self.direction == "k")
        shared, channels = self.beta.of is not None, self.b.per == "channel"
        return [
            (
                self.decay == "diagonal" and self.g.kind in ("retnet_decay", "lightning_decay"),
                f"g {self.g.kind} has one number for each head: it takes decay scalar",
            ),
            (
                self.decay == "scalar" and self.g.per == "channel",
                f"g {self.g.kind} has a number for each channel: it takes decay diagonal",
            ),
            (
                shared and (self.decay != "scalar" or self.g.kind != "mamba2_decay"),
                "beta mamba2_step shares the projection of a scalar g: it takes decay scalar and g mamba2_decay",
            ),
            (
                erases and self.erase == "beta" and (shared or self.write == "forgotten"),
                "erase beta needs a beta of its own between 0 and 2: take erase own",
            ),
            (
                channels and (self.low_rank == "tied" or self.reflects),
                "b channel_sigmoid takes low_rank free, and not reflects",
            ),
            (
                self.low_rank == "free" and along_k and not channels,
                "low_rank free along k with one strength for each head is low_rank tied",
            ),
            (
                erases and along_k and self.qk != "unit" and self.strength == "euler",
                f"erasing along k needs its norm to be 1: take qk unit, not {self.qk}, or strength exact or implicit",
            ),
            (
                self._most_erased() > (2 if self.reads == "decayed_state" or self.decay == "none" else 1),
                f"the low rank erases up to {self._most_erased():g} of what it reads, and the state would grow",
            ),
            (
                steps and (self.low_rank == "free" or shared or self.write != "beta" or self.decay_by != "gate"),
                "micro_steps above 1 take low_rank tied or none, write beta, and a beta and g of their own",
            ),
            (steps and self.reads == "state", "micro_steps above 1 take reads decayed_state"),
            (
                steps and (self.pre_state or not self.value.constant or self.residual != "none"),
                "micro_steps above 1 take no pre_state, no value gate and no residual",
            ),
            (
                self.residual != "none" and (self.pre_state or self.low_rank == "free" or self.signed),
                "residual takes low_rank tied or none, and neither pre_state nor signed",
            ),
            (
                self.residual != "none" and self.decay == "diagonal",
                "residual takes decay scalar or none: a second state has no kernel with a diagonal decay",
            ),
            (
                self.residual != "none" and self.low_rank == "tied" and self.qk != "unit",
                f"residual with low_rank tied erases along k: take qk unit, not {self.qk}",
            ),
            (
                self.gamma.of is not None and (self.beta.constant or shared),
                "gamma like_beta shares the projection of beta: it takes a beta that has one",
            ),
        ]

    def _most_erased(self) -> float:
        """The largest e, for a key of unit norm."""
        if self.low_rank == "none":
            return 0.0
        most = 1.0 if self.strength != "euler" else self.beta.high if self.erase == "beta" else 1.0
        return (2 if self.reflects else 1) * self.b.high * most

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return cast(Literal["unit", "silu", "raw"], self.qk)

    @property
    def silu_of_v(self) -> bool:
        return self.silu_v

    @property
    def second_state(self) -> bool:
        return self.residual != "none"

    @property
    def eigenvalues(self) -> tuple[float, float]:
        if self.low_rank == "none":
            return (-1.0 if self.signed else 1.0 if self.decay == "none" else 0.0, 1.0)
        if self.decay != "none" and self.reads == "state":
            return (-self._most_erased(), 1.0)
        return (-1.0 if self.micro_steps > 1 else min(0.0, 1 - self._most_erased()), 1.0)

    def operands(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        g: Tensor,
        dt: Tensor,
        a: Tensor,
        s: Tensor,
        tau: Tensor,
        xi: Tensor,
        w: Tensor,
        b: Tensor,
        rho: Tensor,
        beta: Tensor,
        value: Tensor,
        d: Tensor,
        bonus: Tensor,
        gamma: Tensor,
    ) -> Operands:
        key, write, log_alpha, sign = k, beta, g, None
        if self.decay_by == "step":
            log_alpha, write = -dt[..., None] * a, dt
        elif self.decay_by == "selection":
            log_alpha, key = -s * tau, F.normalize(k, dim=-1) * _power(s, tau)
        elif self.decay_by == "key":
            log_alpha, write = _kept(beta, k), _implicit(beta, k)
        elif self.signed:
            log_alpha, sign = _signed(g.expand(q.shape[:3] if self.decay == "scalar" else q.shape))
        if self.strength != "euler":
            write = _exact(beta, k) if self.strength == "exact" else _implicit(beta, k)

        e = left = right = None
        if self.low_rank != "none":
            channels = self.b.per == "channel"
            strength = b if self.erase == "own" else b * (write[..., None] if channels else write)
            strength = 2 * strength if self.reflects else strength
            if self.low_rank == "tied":
                e = strength
            else:
                x = w if self.direction == "w" else k
                x = F.normalize(xi * k, dim=-1, eps=1e-6) if self.direction == "kappa" else x
                erased = (strength if channels else strength[..., None]) * x
                left, right = (-x, erased) if channels and self.b_on == "read" else (-erased, x)

        if self.write == "forgotten":
            forgotten = -torch.expm1(g)
            if self.decay == "scalar":
                write = forgotten
            else:
                key = forgotten.expand(k.shape) if self.key == "none" else forgotten * k
        if not self.rho.constant:
            key = key * (1 + (b - 1) * rho)
        if self.micro_steps > 1 and self.decay != "none":
            rows = q.shape[:3] if self.decay == "scalar" else q.shape
            log_alpha = _first(log_alpha.expand(rows), self.micro_steps)
        token = fit = None
        if self.pre_state and self.bonus.high:
            token = (q * key if self.bonus.constant else q * bonus * key).sum(-1)
        if self.second_state:
            fit = Fit(
                residual=ResidualState(loss=cast(Any, self.residual)),
                r=q,
                read=gamma if self.gated else None,
                v=v,
                strength=gamma,
                e=gamma if self.low_rank == "tied" else None,
            )
        return Operands(
            r=q,
            k=key,
            u=v if self.value.constant else value * v,
            beta=write,
            g=log_alpha if self.decay != "none" else None,
            sign=sign,
            e=e,
            a=left,
            b=right,
            read=g.exp() if self.read == "decayed" else None,
            d=None if self.d.constant else d,
            bonus=token,
            fit=fit,
        )


def _norm(k: Tensor, beta: Tensor) -> Tensor:
    """|k|^2 in beta's dtype, [B, T, H]."""
    return k.to(beta.dtype).square().sum(-1)


def _implicit(beta: Tensor, k: Tensor) -> Tensor:
    """beta / (1 + beta |k|^2): the step to the minimum of |S' - S|^2 + beta |S'^T k - v|^2 (arXiv:2407.14207)."""
    return beta / (1 + beta * _norm(k, beta))


def _kept(beta: Tensor, k: Tensor) -> Tensor:
    """log(1 - delta k^2) by channel, delta = beta / (1 + beta |k|^2), exact where delta k^2 is near 1."""
    squares = k.to(beta.dtype).square()
    norm = squares.sum(-1, keepdim=True)
    return torch.log1p(beta[..., None] * (norm - squares).clamp_min(0)) - torch.log1p(beta[..., None] * norm)


def _exact(beta: Tensor, k: Tensor) -> Tensor:
    """(1 - exp(-beta |k|^2)) / |k|^2: the delta rule's differential equation over a time of beta (arXiv:2512.12602).

    A series near 0, where the quotient's gradient would lose all digits.
    """
    z = beta * _norm(k, beta)
    near = z < 0.03
    far = torch.where(near, 1.0, z)
    series = 1 - z / 2 * (1 - z / 3 * (1 - z / 4 * (1 - z / 5 * (1 - z / 6 * (1 - z / 7)))))
    return beta * torch.where(near, series, -torch.expm1(-far) / far)


def _power(s: Tensor, tau: Tensor) -> Tensor:
    """s ** tau, with a finite gradient at s = 0."""
    return (tau * s.clamp_min(1e-12).log()).exp()


def _signed(g: Tensor) -> tuple[Tensor, Tensor]:
    """log |alpha| and the sign of alpha = 2 exp(g) - 1, which is a difference that 16 bits would lose near 0."""
    alpha = 2 * g.to(torch.promote_types(g.dtype, torch.float32)).exp() - 1
    return alpha.abs().clamp_min(LEAST).log(), torch.where(alpha < 0, -1.0, 1.0).to(alpha)


def _first(g: Tensor, n: int) -> Tensor:
    """g at the first of each token's n steps, and 0 at the others: [B, T, H, ..] to [B, n T, H, ..]."""
    return F.pad(g.unsqueeze(2), (0, 0) * (g.dim() - 2) + (0, n - 1)).flatten(1, 2)


def _word(value: Option) -> object:
    """A knob's value as `WHEN` names it."""
    return value.kind if isinstance(value, Gate) else value


POINTS: Mapping[str, Mapping[str, Any]] = {
    "linear_attention": {"decay": "none", "low_rank": "none", "beta": 1},
    "retnet": {"g": "retnet_decay", "low_rank": "none", "beta": 1},
    "mamba2": {"low_rank": "none", "beta": "mamba2_step"},
    "sgla": {"low_rank": "none"},
    "metala": {"g": "metala_decay", "low_rank": "none", "write": "forgotten"},
    "gla": {"decay": "diagonal", "g": "gla_decay", "low_rank": "none", "beta": 1},
    "hgrn2": {"decay": "diagonal", "g": "metala_decay", "low_rank": "none", "write": "forgotten", "key": "none"},
    "signed_gla": {"decay": "diagonal", "g": "gla_decay", "signed": True, "low_rank": "none", "beta": 1},
    "rwkv6": {
        "decay": "diagonal", "g": "rwkv6_decay", "low_rank": "none", "beta": 1, "qk": "raw", "pre_state": True,
        "bonus": {"head_channel": {"init": 0.5}},
    },
    "longhorn": {"decay": "diagonal", "decay_by": "key", "low_rank": "none", "qk": "raw"},
    "mamba": {"decay": "diagonal", "decay_by": "step", "low_rank": "none", "qk": "raw"},
    "rodimus": {"decay": "diagonal", "decay_by": "selection", "low_rank": "none", "qk": "raw"},
    "deltanet": {"decay": "none"},
    "gated_deltanet": {},
    "kda": {"decay": "diagonal"},
    "gated_deltanet2": {
        "decay": "diagonal", "low_rank": "free", "erase": "own", "b": "channel_sigmoid", "beta": 1,
        "value": "value_sigmoid",
    },
    "comba": {"reads": "state", "b": "head_sigmoid", "d": {"head": {"init": 0.02}}},
    "efla": {"decay": "none", "strength": "exact", "qk": "silu"},
    "delta_product": {"decay": "none", "beta": {"sigmoid": {"max": 2}}, "micro_steps": 2},
    "rwkv7": {
        "decay": "diagonal", "g": "rwkv7_decay", "low_rank": "free", "reads": "state", "direction": "kappa",
        "erase": "own", "b": "channel_sigmoid", "b_on": "write", "rho": {"head_channel": {"init": 1}}, "beta": 1,
        "qk": "raw",
    },
    "rla": {"low_rank": "none", "read": "decayed", "residual": "huber", "gamma": "sigmoid"},
    "rdn": {"read": "decayed", "residual": "huber", "gamma": "sigmoid"},
}  # fmt: skip
"""The published rules, each at its defaults, as knobs of `algebra`."""

OUTSIDE: Mapping[str, str] = {
    **dict.fromkeys(
        ("attention", "forgetting_attention", "path_attention"),
        "softmax over the keys of all tokens: no state of a fixed size",
    ),
    **dict.fromkeys(("gka", "mesa_net", "kalman"), "solves a system for each token: no recurrence of one state"),
    **dict.fromkeys(
        ("ttt_linear", "ttt_mlp", "titans", "miras", "atlas"), "learns by mini-batches, windows or nonlinear losses"
    ),
    "huber_deltanet": "clips the error of the state itself, so that it is not linear in it",
    **dict.fromkeys(("gsa", "abc", "raven", "mom", "rla_stages"), "several recurrences, one after another"),
    "log_linear_attention": "a state for each level of a tree",
    **dict.fromkeys(("based", "rebased"), "features of another width, and a normalizer of the output"),
    "momentum_deltanet": "a state of twice the width, for the momentum",
    **dict.fromkeys(
        ("lightnet", "mlstm", "mamba3", "preconditioned_gated_deltanet", "window_linear"),
        "carries more than its state from token to token: a running sum, a stabilizer, a phase, a window",
    ),
}
"""The rules that are no points of `algebra`, and why."""
