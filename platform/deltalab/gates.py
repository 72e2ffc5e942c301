"""Gate parameterizations. Each says how a symbol of an update rule is computed, its range, and where it starts.

A gate is data and one function. `models.rule_inputs.gates.Gates` turns the gate into parameters. To add a gate, write a
function that returns a `Gate`, decorate it with `@parameterization`, and put it in the file of the rule that needs it.

Some gates here, such as `retnet_decay`, serve a single built-in rule. They stay in this file, because moving a gate
would change the file of its rule, and the hash of a rule's file is part of the identity of every trial that was run
with the rule.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.gate import PROJECTED as PROJECTED
from deltalab.gate import Gate as Gate
from deltalab.gate import Per as Per
from deltalab.gate import Start as Start
from deltalab.gate import Value as Value
from deltalab.gate import _unpickled as _unpickled  # a pickle of a gate may name it here
from deltalab.gate import parameterization as parameterization


def _positive(gate: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if number <= 0:
            raise InputError(f"{gate}.{name} must be positive, not {number:g}")


def _not_negative(gate: str, **numbers: float) -> None:
    for name, number in numbers.items():
        if number < 0:
            raise InputError(f"{gate}.{name} must be at least 0, not {number:g}")


def _full(number: float) -> Start:
    return lambda shape, generator: torch.full(shape, float(number))


@parameterization
def const(value: float) -> Gate:
    """A fixed number.

    Examples:
        >>> const(1).low, const(1).constant
        (1.0, True)
    """
    return Gate(per="none", low=float(value), high=float(value), value=lambda z, p: z + value)


@parameterization
def sigmoid(max: float = 1.0) -> Gate:
    """A sigmoid of a projection of the input, in [0, max].

    The value is max * sigmoid(W x), the beta of DeltaNet. With max = 2, the eigenvalues of DeltaNet reach -1.
    """
    _positive("sigmoid", max=max)
    value = (lambda z, p: z.sigmoid()) if max == 1 else (lambda z, p: max * z.sigmoid())
    return Gate(per="token", low=0.0, high=float(max), value=value)


@parameterization
def head_sigmoid(init: float = 0.5) -> Gate:
    """A learned number for each head in [0, 1]: sigmoid(c), with a learned c, starting at `init`.

    References:
        The b of Comba, arXiv:2506.02475, section 3.1.
    """
    if not 0 < init < 1:
        raise InputError(f"head_sigmoid.init must lie between 0 and 1, not {init:g}")
    start = math.log(init / (1 - init))
    return Gate(
        per="head", low=0.0, high=1.0, parameters={"logit": _full(start)}, value=lambda z, p: (z + p["logit"]).sigmoid()
    )


@parameterization
def head(init: float) -> Gate:
    """A learned number for each head, without bounds, starting at `init`; the d of Comba."""
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
    """The log-decay g = -a softplus(W x + c), which starts near 0, so that alpha = exp(g) starts near 1.

    The start of a is uniform in [a_min, a_max], and that of softplus(c) is log-uniform in [dt_min, dt_max]. a_min is 0
    in FLA's layers of Gated DeltaNet and Comba.

    References:
        Mamba2, arXiv:2405.21060; the forget gate of Comba, arXiv:2506.02475, Table 5.
    """
    _positive("mamba2_decay", a_max=a_max, dt_min=dt_min, dt_max=dt_max)
    _not_negative("mamba2_decay", a_min=a_min)
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
def kda_decay(
    rank: float = 0, a_min: float = 1.0, a_max: float = 16.0, dt_min: float = 0.001, dt_max: float = 0.1
) -> Gate:
    """The log-decay of KDA, g = -a softplus(W_1 W_2 x + c), with an a for each head and a c for each channel.

    a and softplus(c) start as in `mamba2_decay`. A `rank` of 0 is the width of a head's values.

    References:
        Kimi Team 2025, arXiv:2510.26692.
    """
    _not_negative("kda_decay", rank=rank)
    plain = mamba2_decay(a_min=a_min, a_max=a_max, dt_min=dt_min, dt_max=dt_max)
    return replace(
        plain,
        per="channel",
        rank=int(rank),
        by_head=frozenset({"log_a"}),
        value=lambda z, p: -p["log_a"].exp()[:, None] * F.softplus(z + p["dt_bias"]),
    )


@parameterization
def kda_bounded_decay(rank: float = 0, least: float = -5.0, dt_min: float = 0.001, dt_max: float = 0.1) -> Gate:
    """The log-decay of KDA with a lower bound, g = least sigmoid(a (W_1 W_2 x + c)): FLA's `safe_gate`.

    a is learned for each head and starts at 1, and c starts as in `mamba2_decay`. A `rank` of 0 is the width of a
    head's values.
    """
    _not_negative("kda_bounded_decay", rank=rank)
    if least >= 0:
        raise InputError(f"kda_bounded_decay.least must be negative, not {least:g}")
    start = mamba2_decay(dt_min=dt_min, dt_max=dt_max).parameters["dt_bias"]
    return Gate(
        per="channel",
        low=float(least),
        high=0.0,
        rank=int(rank),
        by_head=frozenset({"log_a"}),
        parameters={"log_a": _full(0.0), "dt_bias": start},
        value=lambda z, p: least * (p["log_a"].exp()[:, None] * (z + p["dt_bias"])).sigmoid(),
    )


@parameterization
def mamba2_step() -> Gate:
    """The input gate of Mamba2, softplus(W x + c), with the W and c of the rule's g. It is small if alpha is near 1."""
    return Gate(per="token", low=0.0, high=math.inf, of="g", value=lambda z, p: F.softplus(z + p["dt_bias"]))


@parameterization
def gla_decay(tau: float = 16.0, rank: float = 16) -> Gate:
    """The log-decay of GLA, g = log sigmoid(W_1 W_2 x) / tau. It is near 0 for tau = 16.

    References:
        arXiv:2506.02475, Table 5.
    """
    _positive("gla_decay", tau=tau, rank=rank)
    return Gate(per="token", low=-math.inf, high=0.0, rank=int(rank), value=lambda z, p: F.logsigmoid(z) / tau)


@parameterization
def metala_decay() -> Gate:
    """The log-decay of MetaLA, g = log sigmoid(W x): alpha starts around 1/2, not near 1.

    References:
        arXiv:2506.02475, Table 5.
    """
    return Gate(per="token", low=-math.inf, high=0.0, value=lambda z, p: F.logsigmoid(z))


@parameterization
def biased_decay(init: float = 0.0) -> Gate:
    """The log-decay g = log sigmoid(W x + c) with a learned c for each head, starting at `init`: FoX and MesaNet."""
    return Gate(
        per="token",
        low=-math.inf,
        high=0.0,
        parameters={"bias": _full(init)},
        value=lambda z, p: F.logsigmoid(z + p["bias"]),
    )


@parameterization
def metala_input() -> Gate:
    """The input gate beta = 1 - alpha = sigmoid(-W x), which balances MetaLA's decay. It shares W with the rule's g."""
    return Gate(per="token", low=0.0, high=1.0, of="g", value=lambda z, p: (-z).sigmoid())


@parameterization
def like_beta() -> Gate:
    """A gate sigmoid(W x) that shares W with the rule's beta. It equals beta if beta is a plain sigmoid."""
    return Gate(per="token", low=0.0, high=1.0, of="beta", value=lambda z, p: z.sigmoid())


@parameterization
def retnet_decay() -> Gate:
    """The fixed log-decay of RetNet, g = log(1 - 2 ** (-5 - h)) for head h = 0, 1, ...

    References:
        Sun et al. 2023, arXiv:2307.08621.
    """
    return Gate(
        per="none", low=math.log(31 / 32), high=0.0, value=lambda z, p: torch.log1p(-(2.0 ** (-5 - _heads(z)))) + z
    )


@parameterization
def lightning_decay() -> Gate:
    """The fixed log-decay of Lightning attention, g = -2 ** (-8 (h + 1) / H) for head h of H: the slopes of ALiBi.

    References:
        Qin et al. 2024, arXiv:2405.17381, without their factor for each layer.
    """
    return Gate(per="none", low=-1.0, high=0.0, value=lambda z, p: z - 2.0 ** (-8 * (_heads(z) + 1) / z.shape[-1]))


def _heads(z: Tensor) -> Tensor:
    return torch.arange(z.shape[-1], dtype=z.dtype, device=z.device)


@parameterization
def rwkv7_decay(rank: float = 16) -> Gate:
    """The log-decay of RWKV-7, g = -exp(-1/2) sigmoid(W_1 W_2 x + c), so that alpha is in [0.545, 1].

    References:
        Peng et al. 2025, arXiv:2503.14456, who have a tanh between W_1 and W_2.
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
    """A gate sigmoid(W_1 W_2 x) for each channel of the key, in [0, 1]: RWKV-7's learning rate, without its bias."""
    _positive("channel_sigmoid", rank=rank)
    return Gate(per="channel", low=0.0, high=1.0, rank=int(rank), value=lambda z, p: z.sigmoid())


@parameterization
def full_channel_sigmoid(max: float = 1.0) -> Gate:
    """A gate max sigmoid(W x) for each channel of the key, in [0, max], by one matrix: that of Gated DeltaNet-2."""
    _positive("full_channel_sigmoid", max=max)
    return Gate(per="channel", low=0.0, high=float(max), value=lambda z, p: max * z.sigmoid())


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
    """A vector W x besides q, k and v. It is convolved as q, k and v are, and gets neither SiLU nor a norm.

    Args:
        rank: The width r of a projection W_1 W_2 x through r channels; 0 for one matrix.
    """
    return _vector("raw", rank, math.inf)


@parameterization
def unit_vector(rank: float = 0) -> Gate:
    """A vector W x besides q, k and v. It is convolved as q, k and v are, then gets SiLU and unit norm.

    Examples are the w of PaTH (arXiv:2505.16381), and a key that erases without writing.

    Args:
        rank: The width r of a projection W_1 W_2 x through r channels; 0 for one matrix.
    """
    return _vector("unit", rank, 1.0)


def _vector(features: Literal["unit", "raw"], rank: float, most: float) -> Gate:
    if rank < 0:
        raise InputError(f"a vector's rank must be at least 0, not {rank:g}")
    return Gate(per="channel", low=-most, high=most, rank=int(rank) or None, features=features, value=lambda z, p: z)


@parameterization
def value_sigmoid(rank: float = 16) -> Gate:
    """A gate sigmoid(W_1 W_2 x) for each channel of the value, in [0, 1].

    Args:
        rank: The width r of the projection W_1 W_2 x through r channels; 0 for one matrix.
    """
    if rank < 0:
        raise InputError(f"value_sigmoid.rank must be at least 0, not {rank:g}")
    return Gate(per="value_channel", low=0.0, high=1.0, rank=int(rank) or None, value=lambda z, p: z.sigmoid())


@parameterization
def channel_step(dt_min: float = 0.001, dt_max: float = 0.1) -> Gate:
    """The length of a step, learned as exp(c) for each head and channel of the value; it starts in [dt_min, dt_max].

    The start is log-uniform.

    References:
        S4D, arXiv:2206.11893.
    """
    return _step_length("head_value_channel", dt_min, dt_max)


@parameterization
def pair_step(dt_min: float = 0.001, dt_max: float = 0.1) -> Gate:
    """`channel_step` for each head and pair of channels of the value.

    References:
        S5, arXiv:2208.04933.
    """
    return _step_length("head_value_pair", dt_min, dt_max)


def _step_length(per: Per, dt_min: float, dt_max: float) -> Gate:
    _positive("dt", dt_min=dt_min, dt_max=dt_max)
    if dt_min > dt_max:
        raise InputError("dt_min must not exceed dt_max")
    return Gate(
        per=per,
        low=0.0,
        high=math.inf,
        parameters={"log": lambda shape, generator: _log_uniform(dt_min, dt_max)(shape, generator).log()},
        value=lambda z, p: z + p["log"].exp(),
    )


@parameterization
def slot_rate(slots: float = 32, init: float = 0.5) -> Gate:
    """A rate of decay, learned as exp(c) for each head, channel of the value and slot; it starts at `init`.

    References:
        S4D-Lin, arXiv:2206.11893.
    """
    _positive("slot_rate", slots=slots, init=init)
    return _of_slot(slots, {"log": _full(math.log(init))}, lambda z, p: z + p["log"].exp(), low=0.0)


@parameterization
def slot_frequency(slots: float = 32) -> Gate:
    """A learned frequency for each head, channel of the value and slot n = 0, 1, ..., which starts at pi n.

    References:
        S4D-Lin, arXiv:2206.11893.
    """
    _positive("slot_frequency", slots=slots)

    def start(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return math.pi * torch.arange(int(slots)).repeat(shape[-1] // int(slots)).expand(shape).clone()

    return _of_slot(slots, {"value": start}, lambda z, p: z + p["value"])


@parameterization
def slot_weight(slots: float = 32) -> Gate:
    """A learned weight for each head, channel of the value and slot, which starts normal with variance 1/2.

    Two such weights are a complex number of size 1.

    References:
        S4D, arXiv:2206.11893.
    """
    _positive("slot_weight", slots=slots)

    def start(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.empty(shape).normal_(std=0.5**0.5, generator=generator)

    return _of_slot(slots, {"value": start}, lambda z, p: z + p["value"])


def _of_slot(slots: float, parameters: Mapping[str, Start], value: Value, *, low: float = -math.inf) -> Gate:
    return Gate(per="head_value_slot", slots=int(slots), low=low, high=math.inf, parameters=parameters, value=value)


@parameterization
def full_value_sigmoid() -> Gate:
    """A gate sigmoid(W x) for each channel of the value, in [0, 1], by one matrix: that of Gated DeltaNet-2."""
    return Gate(per="value_channel", low=0.0, high=1.0, value=lambda z, p: z.sigmoid())
