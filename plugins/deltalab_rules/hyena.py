"""Hyena: a long convolution of k * v whose filter is a small network of the lag, read by q."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, Per, parameterization
from deltalab.long_convolution import Convolved, LongConvolution
from deltalab.rule import State, knob

SLOWEST, FASTEST = math.log(100) / 1.5, math.log(100) / 0.3
"""The rates of the windows: a channel's filter has faded to 1% after 1.5 to 0.3 of `length`."""


def _uniform(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    return torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)


@parameterization
def filter_network(width: float = 64) -> Gate:
    """The hidden layers of a head's filter: matrices [3, width] and [width, width] and two biases, in a row.

    All numbers stand over the root of a layer's inputs and start uniform in [-1, 1], as PyTorch's layers do.
    """
    if width < 1:
        raise InputError(f"filter_network.width must be at least 1, not {width:g}")
    return Gate(
        per="head_slot",
        slots=int(width * width + 5 * width),
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": _uniform},
        value=lambda z, p: z + p["value"],
    )


@parameterization
def filter_output(width: float = 64) -> Gate:
    """The last layer of a head's filter, a vector [width] for each channel of v; numbers as in `filter_network`."""
    return _output("head_value_slot", width)


@parameterization
def shared_filter_output(width: float = 64) -> Gate:
    """The last layer of a filter that a head's channels share, a vector [width]; numbers as in `filter_network`."""
    return _output("head_slot", width)


def _output(per: Per, width: float) -> Gate:
    if width < 1:
        raise InputError(f"the width of a filter must be at least 1, not {width:g}")
    return Gate(
        per=per,
        slots=int(width),
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": _uniform},
        value=lambda z, p: z + p["value"],
    )


@parameterization
def filter_bias() -> Gate:
    """A learned number for each head and channel of the value, which is added to the filter at lag 0; starts normal."""
    return Gate(
        per="head_value_channel",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.empty(shape).normal_(generator=generator)},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class Hyena(LongConvolution):
    """o_t = scale q_t * sum_{i <= t} h_{t-i} * k_i * v_i
    outer: o_t = scale (sum_{i <= t} h_{t-i} * k_i v_i^T)^T q_t
    h_s = exp(-w s / length) * W sin(f (W_2 sin(f (W_1 e_s + b_1)) + b_2)) + d [s = 0]
    e_s = (s / length, cos(c s), -sin(c s)),   c = 2 pi 1e-4 / length,   f = frequency

    Poli et al. 2023 (arXiv:2302.10866, Section 3), of order 2; all is element-wise over the channels, so that key_dim
    and value_dim are equal. outer: True with last: shared_filter_output is multi-head Hyena (Massaroli et al. 2023,
    arXiv:2310.18780, Section 4). The filter's network belongs to a head: with one head it is theirs. The argument of a
    sine, and the last sum, is divided by the root of the number of inputs of its layer. w is fixed, evenly spaced over
    a head's channels. A sequence may be longer than length. d: const(0) leaves the bias out.

    The state holds all k_i * v_i so far, and with outer all k_i and v_i. No Triton kernel computes it: a block of
    tokens is a matrix product, and longer lags are FFTs.
    """

    name: ClassVar[str] = "hyena"
    paper: ClassVar[str] = "arXiv:2302.10866"

    hidden: Gate = knob(filter_network())
    last: Gate = knob(filter_output(), shared_filter_output())
    d: Gate = knob(filter_bias(), forms.const(0))
    length: int = knob(1024, 64)
    frequency: float = knob(10.0, 1.0)
    outer: bool = knob(False, True)

    def __post_init__(self) -> None:
        width = self.last.slots
        if self.hidden.slots != width * width + 5 * width:
            raise InputError(f"{self.name}: hidden and last must have the same width")
        if self.length < 1:
            raise InputError(f"{self.name}.length must be at least 1, not {self.length}")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def widths(self, key_dim: int, value_dim: int) -> tuple[int, ...]:
        if self.outer:
            return key_dim, value_dim
        if key_dim != value_dim:
            raise InputError(
                f"rule '{self.name}' takes as many channels of the key as of the value, not {key_dim} and {value_dim}"
            )
        return (value_dim,)

    def convolved(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Convolved:
        def taps(count: int) -> Tensor:
            return self._taps(count, v.shape[-1], gates)

        if not self.outer:
            return Convolved(kept=(k * v,), x=lambda x: x, taps=taps, output=lambda y: q * y)
        return Convolved(
            kept=(k, v),
            x=lambda k, v: (k[..., None] * v[..., None, :]).flatten(-2),
            taps=lambda count: taps(count).repeat(1, 1, k.shape[-1]),
            output=lambda y: (q[..., None] * y.unflatten(-1, (-1, v.shape[-1]))).sum(-2),
        )

    def _taps(self, count: int, channels: int, gates: Mapping[str, Tensor]) -> Tensor:
        """The filter of all heads at the lags 0 ... count - 1, [count, H, V]."""
        width = self.last.slots
        sizes = (3 * width, width, width * width, width)
        first, first_bias, second, second_bias = gates["hidden"].split(sizes, dim=-1)
        last = gates["last"].unflatten(-1, (-1, width)).expand(-1, channels, -1)
        lag = torch.arange(count, device=last.device, dtype=last.dtype)[:, None] / self.length
        turn = 2 * math.pi * 1e-4 * lag
        features = torch.cat([lag, turn.cos(), -turn.sin()], dim=-1)
        x = torch.einsum("te,hew->thw", features, first.unflatten(-1, (3, width))) + first_bias
        x = (self.frequency * x / 3**0.5).sin()
        x = torch.einsum("thw,hwx->thx", x, second.unflatten(-1, (width, width))) + second_bias
        x = (self.frequency * x / width**0.5).sin()
        x = torch.einsum("thw,hvw->thv", x, last) / width**0.5
        rates = torch.linspace(SLOWEST, FASTEST, channels, device=last.device, dtype=last.dtype)
        now = torch.zeros_like(lag)
        now[0] = 1.0
        d = gates["d"] if gates["d"].dim() > 1 else gates["d"][:, None]
        taps: Tensor = (-rates * lag).exp()[:, None] * x + now[..., None] * d
        return taps

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        hidden: Tensor,
        last: Tensor,
        d: Tensor,
    ) -> tuple[Tensor, State]:
        kept = (k, v) if self.outer else (k * v,)
        state = tuple(torch.cat([past, new[:, :, None]], dim=2) for past, new in zip(state, kept, strict=True))
        width, count, channels = self.last.slots, state[0].shape[2], v.shape[-1]
        s = torch.arange(count - 1, -1, -1, device=v.device).to(hidden) / self.length
        angle = 2e-4 * math.pi * s
        W1, b1 = hidden[:, : 3 * width].view(-1, 3, width), hidden[:, 3 * width : 4 * width]
        W2, b2 = hidden[:, 4 * width : -width].view(-1, width, width), hidden[:, -width:]
        x = (torch.stack([s, angle.cos(), -angle.sin()], dim=-1) @ W1 + b1[:, None]) / math.sqrt(3)
        x = ((self.frequency * x).sin() @ W2 + b2[:, None]) / math.sqrt(width)
        h = (self.frequency * x).sin() @ last.view(last.shape[0], -1, width).mT / math.sqrt(width)
        steps = max(channels - 1, 1)
        rates = hidden.new_tensor([SLOWEST + (FASTEST - SLOWEST) * j / steps for j in range(channels)])
        h, d = (-s[:, None] * rates).exp() * h, d if d.dim() > 1 else d[:, None]
        if not self.outer:
            return scale * q * ((h * state[0]).sum(2) + d * k * v), state
        products = torch.einsum("bhk,bhik->bhi", q, state[0])
        return scale * ((products[..., None] * h * state[1]).sum(2) + d * products[..., -1:] * v), state
