"""Gate parameterizations: how a symbol of an update rule is computed from the input, its range and its start.

A gate is data and one function. `models.layer.Gates` turns it into parameters. To add a gate, write a function that
returns a `Gate` under `@parameterization`, in the file of the rule that needs it.

Gates of a single built-in rule, such as `retnet_decay`, stay here: moving one would change the file of its rule, whose
hash is part of the identity of every trial that was run with it.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from pickle import PicklingError
from typing import Any, Literal, ParamSpec, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError, unknown

P = ParamSpec("P")
MOST_WIDTH = 2**16
"""The most that a gate's rank or slots may be."""

Start: TypeAlias = Callable[[tuple[int, ...], torch.Generator | None], Tensor]
Value: TypeAlias = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
Per: TypeAlias = Literal[
    "token",
    "step",
    "channel",
    "value_channel",
    "slot",
    "head",
    "head_channel",
    "head_value_channel",
    "head_slot",
    "none",
]
PROJECTED: tuple[Per, ...] = ("token", "step", "channel", "value_channel", "slot")
"""The kinds of gates whose values depend on the input."""


@dataclass(frozen=True)
class Gate:
    """One parameterization of a gate.

    per: where its value comes from, and the value's shape.
        token: W x, one per head, [B, T, H].
        step: W x, one per head and each of a token's n steps, [B, n T, H].
        channel: W x, one per head and channel of the key, [B, T, H, K].
        value_channel: W x, one per head and channel of the value, [B, T, H, V].
        slot: W x, `slots` per head (of a memory, or of its levels), [B, T, H, slots].
        head: learned, one per head, [H].
        head_channel, head_value_channel, head_slot: learned, [H, K], [H, V] and [H, slots].
        none: fixed, [H].
    low, high: the closed range of its values. Strengths are in linear space; g is log-decay, in [-inf, 0].
    parameters: name -> start(shape, generator), where shape is that of its value without batch and time.
        generator is None for torch's global one. Weight decay does not apply to them.
    value: (z, parameters) -> the gate's value, where z is the projection in the gate's shape, or zeros without one.
    rank: the width r of a projection W_1 W_2 x through r channels; None for one matrix.
    of: the gate whose projection and parameters this one shares; None for its own.
    slots: how many values a gate per slot has.
    features: None for a gate. A projected vector besides q, k and v, per `channel` or `value_channel`, has `unit`,
        `silu` or `raw`: after the layer's short convolution it gets SiLU and unit norm, SiLU, or nothing, like q and k.
    kind, options, again: set by `parameterization`: the function's name, its arguments, and the function itself, which
        remakes the gate with other arguments.
    """

    per: Per
    low: float
    high: float
    value: Value = field(compare=False, repr=False)
    parameters: Mapping[str, Start] = field(default_factory=dict, compare=False, repr=False)
    rank: int | None = None
    of: str | None = None
    slots: int = 0
    features: Literal["unit", "silu", "raw"] | None = None
    kind: str = ""
    options: tuple[tuple[str, float], ...] = ()
    again: "Callable[..., Gate] | None" = field(default=None, compare=False, repr=False)

    def shape(self, heads: int, key_dim: int, value_dim: int) -> tuple[int, ...]:
        """The shape of its value without batch and time."""
        widths = {"channel": key_dim, "value_channel": value_dim, "slot": self.slots}
        width = widths.get(self.per.removeprefix("head_"))
        return (heads,) if width is None else (heads, width)

    @property
    def projected(self) -> bool:
        """Whether it depends on the input."""
        return self.per in PROJECTED

    @property
    def constant(self) -> bool:
        """Whether it depends on neither the input nor a parameter."""
        return self.per == "none"

    def __deepcopy__(self, memo: object) -> "Gate":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its parameterization and plain fields, since functions made inside others do not pickle."""
        if self.again is None:
            raise PicklingError(f"a gate pickles if @parameterization made it, unlike {self!r}")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        return _unpickled, (self.again, plain)

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{name}={value:g}' for name, value in self.options)})"

    def spec(self) -> dict[str, dict[str, float]]:
        """The gate as YAML says it."""
        return {self.kind: dict(self.options)}

    def remade(self, given: Mapping[str, object], *, where: str) -> "Gate":
        """The same parameterization with other numbers.

        Raises `InputError` for an option that it does not have, or a number that it does not take.
        """
        assert self.again is not None
        names = [name for name, _ in self.options]
        for name, number in given.items():
            if name not in names:
                raise unknown("option", name, names, where=f"{where}: gate '{self.kind}'")
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise InputError(f"{where}: {self.kind}.{name} takes a finite number, not {number!r}")
        try:
            found = self.again(**{**dict(self.options), **given})
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        if (width := max(found.rank or 0, found.slots)) > MOST_WIDTH:
            raise InputError(f"{where}: gate '{self.kind}' is {width:,} wide; a gate is at most {MOST_WIDTH:,} wide")
        return found


def _unpickled(again: Callable[..., Gate], plain: Mapping[str, Any]) -> Gate:
    return replace(again(**dict(plain["options"])), **plain)


def parameterization(make: Callable[P, Gate]) -> Callable[P, Gate]:
    """Names a gate after the function that makes it, so that YAML can say `d: {head: {init: 1.0}}`."""

    signature = inspect.signature(make)

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Gate:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        options = tuple((name, float(number)) for name, number in bound.arguments.items() if number is not None)
        return replace(make(*args, **kwargs), kind=make.__name__.rstrip("_"), options=options, again=made)

    return made


def _positive(gate: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if number <= 0:
            raise InputError(f"{gate}.{name} must be positive, not {number:g}")


def _full(number: float) -> Start:
    return lambda shape, generator: torch.full(shape, float(number))


@parameterization
def const(value: float) -> Gate:
    """A fixed number.

    >>> const(1).low, const(1).constant
    (1.0, True)
    """
    return Gate(per="none", low=float(value), high=float(value), value=lambda z, p: z + value)


@parameterization
def sigmoid(max: float = 1.0) -> Gate:
    """max * sigmoid(W x), in [0, max]. DeltaNet's beta; max = 2 lets its eigenvalues reach -1."""
    _positive("sigmoid", max=max)
    value = (lambda z, p: z.sigmoid()) if max == 1 else (lambda z, p: max * z.sigmoid())
    return Gate(per="token", low=0.0, high=float(max), value=value)


@parameterization
def head_sigmoid(init: float = 0.5) -> Gate:
    """sigmoid(b) with a learned b for each head, in [0, 1], starting at `init`. Comba's b (arXiv:2506.02475, 3.1)."""
    if not 0 < init < 1:
        raise InputError(f"head_sigmoid.init must lie between 0 and 1, not {init:g}")
    start = math.log(init / (1 - init))
    return Gate(
        per="head", low=0.0, high=1.0, parameters={"logit": _full(start)}, value=lambda z, p: (z + p["logit"]).sigmoid()
    )


@parameterization
def head(init: float) -> Gate:
    """A learned number for each head, without bounds, starting at `init`. Comba's d."""
    return Gate(
        per="head", low=-math.inf, high=math.inf, parameters={"value": _full(init)}, value=lambda z, p: z + p["value"]
    )


def _log_uniform(low: float, high: float) -> Start:
    def draw(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.empty(shape).uniform_(math.log(low), math.log(high), generator=generator).exp()

    return draw


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


@parameterization
def mamba2_decay(a_min: float = 1.0, a_max: float = 16.0, dt_min: float = 0.001, dt_max: float = 0.1) -> Gate:
    """g = -a softplus(W x + c), a log-decay that starts near 0, so alpha = exp(g) near 1.

    a starts uniform in [a_min, a_max] and softplus(c) log-uniform in [dt_min, dt_max], as in Mamba2
    (arXiv:2405.21060); Comba's forget gate (arXiv:2506.02475, Table 5).
    """
    _positive("mamba2_decay", a_min=a_min, a_max=a_max, dt_min=dt_min, dt_max=dt_max)
    if a_min > a_max or dt_min > dt_max:
        raise InputError("mamba2_decay: a_min must not exceed a_max, nor dt_min dt_max")
    steps = _log_uniform(dt_min, dt_max)
    return Gate(
        per="token",
        low=-math.inf,
        high=0.0,
        parameters={
            "log_a": lambda shape, generator: torch.empty(shape).uniform_(a_min, a_max, generator=generator).log(),
            "dt_bias": lambda shape, generator: _inverse_softplus(steps(shape, generator)),
        },
        value=lambda z, p: -p["log_a"].exp() * F.softplus(z + p["dt_bias"]),
    )


@parameterization
def mamba2_step() -> Gate:
    """dt = softplus(W x + c) with the W and c of the rule's g: Mamba2's input gate, small where alpha is near 1."""
    return Gate(per="token", low=0.0, high=math.inf, of="g", value=lambda z, p: F.softplus(z + p["dt_bias"]))


@parameterization
def gla_decay(tau: float = 16.0, rank: float = 16) -> Gate:
    """g = log sigmoid(W_1 W_2 x) / tau (arXiv:2506.02475, Table 5, the form of GLA): near 0 for tau = 16."""
    _positive("gla_decay", tau=tau, rank=rank)
    return Gate(per="token", low=-math.inf, high=0.0, rank=int(rank), value=lambda z, p: F.logsigmoid(z) / tau)


@parameterization
def metala_decay() -> Gate:
    """g = log sigmoid(W x): alpha starts around 1/2, not near 1 (arXiv:2506.02475, Table 5, the form of MetaLA)."""
    return Gate(per="token", low=-math.inf, high=0.0, value=lambda z, p: F.logsigmoid(z))


@parameterization
def metala_input() -> Gate:
    """beta = 1 - alpha = sigmoid(-W x) with the W of the rule's g: the input gate that balances MetaLA's decay."""
    return Gate(per="token", low=0.0, high=1.0, of="g", value=lambda z, p: (-z).sigmoid())


@parameterization
def like_beta() -> Gate:
    """sigmoid(W x) with the W of the rule's beta: the same value as a plain sigmoid beta."""
    return Gate(per="token", low=0.0, high=1.0, of="beta", value=lambda z, p: z.sigmoid())


@parameterization
def retnet_decay() -> Gate:
    """g = log(1 - 2 ** (-5 - h)) for head h = 0, 1, ...: fixed (Sun et al. 2023, arXiv:2307.08621)."""
    return Gate(
        per="none", low=math.log(31 / 32), high=0.0, value=lambda z, p: torch.log1p(-(2.0 ** (-5 - _heads(z)))) + z
    )


@parameterization
def lightning_decay() -> Gate:
    """g = -2 ** (-8 (h + 1) / H) for head h of H: ALiBi's slopes, as Lightning attention takes them.

    Qin et al. 2024 (arXiv:2405.17381), without their factor for each layer.
    """
    return Gate(per="none", low=-1.0, high=0.0, value=lambda z, p: z - 2.0 ** (-8 * (_heads(z) + 1) / z.shape[-1]))


def _heads(z: Tensor) -> Tensor:
    return torch.arange(z.shape[-1], dtype=z.dtype, device=z.device)


@parameterization
def rwkv7_decay(rank: float = 16) -> Gate:
    """g = -exp(-1/2) sigmoid(W_1 W_2 x + c), so alpha in [0.545, 1]: Peng et al. 2025 (arXiv:2503.14456), who have
    a tanh between W_1 and W_2.
    """
    _positive("rwkv7_decay", rank=rank)
    rate = math.exp(-0.5)
    return Gate(
        per="token",
        low=-rate,
        high=0.0,
        rank=int(rank),
        parameters={"bias": lambda shape, generator: torch.empty(shape).uniform_(-6.0, -1.0, generator=generator)},
        value=lambda z, p: -rate * (z + p["bias"]).sigmoid(),
    )


@parameterization
def channel_sigmoid(rank: float = 16) -> Gate:
    """sigmoid(W_1 W_2 x), one for each channel of the key, in [0, 1]: RWKV-7's learning rate, without its bias."""
    _positive("channel_sigmoid", rank=rank)
    return Gate(per="channel", low=0.0, high=1.0, rank=int(rank), value=lambda z, p: z.sigmoid())


@parameterization
def head_channel(init: float) -> Gate:
    """A learned number for each channel of each head, without bounds, starting at `init`."""
    return Gate(
        per="head_channel",
        low=-math.inf,
        high=math.inf,
        parameters={"value": _full(init)},
        value=lambda z, p: z + p["value"],
    )


@parameterization
def vector(rank: float = 0) -> Gate:
    """W x, a vector beside q, k and v: convolved as they are, with neither SiLU nor norm. rank: 0 for a full matrix."""
    return _vector("raw", rank, math.inf)


@parameterization
def unit_vector(rank: float = 0) -> Gate:
    """W x, a vector beside q, k and v: convolved, with SiLU and of unit norm. rank: 0 for a full matrix.

    The `w` of PaTH (arXiv:2505.16381), or a key that only erases.
    """
    return _vector("unit", rank, 1.0)


def _vector(features: Literal["unit", "raw"], rank: float, most: float) -> Gate:
    if rank < 0:
        raise InputError(f"a vector's rank must be at least 0, not {rank:g}")
    return Gate(per="channel", low=-most, high=most, rank=int(rank) or None, features=features, value=lambda z, p: z)


@parameterization
def value_sigmoid(rank: float = 16) -> Gate:
    """sigmoid(W_1 W_2 x), one for each channel of the value, in [0, 1]."""
    _positive("value_sigmoid", rank=rank)
    return Gate(per="value_channel", low=0.0, high=1.0, rank=int(rank), value=lambda z, p: z.sigmoid())
