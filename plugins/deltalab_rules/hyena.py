"""Hyena: a long convolution of k * v whose filter is a small network of the lag, read by q."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
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
    """The last layer of a head's filter, [V, width]; numbers as in `filter_network`."""
    if width < 1:
        raise InputError(f"filter_output.width must be at least 1, not {width:g}")
    return Gate(
        per="head_value_slot",
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
    h_s = exp(-w s / length) * W sin(W_2 sin(W_1 e_s + b_1) + b_2) + d [s = 0]
    e_s = (s / length, cos(c s), -sin(c s)),   c = 2 pi 1e-4 / length

    Poli et al. 2023 (arXiv:2302.10866, Section 3), of order 2; all is element-wise over the channels, so that key_dim
    and value_dim are equal. The filter's network has one hidden layer more than its input layer, and belongs to a head:
    with one head it is theirs. w is fixed, evenly spaced over a head's channels. length is the number of tokens to which
    lags are related; the sequence may be longer. d: const(0) leaves the bias out.

    The state holds all k_i * v_i so far. There is no Triton kernel: a block of tokens is a matrix product, and longer
    lags are FFTs.
    """

    name: ClassVar[str] = "hyena"
    paper: ClassVar[str] = "arXiv:2302.10866"

    hidden: Gate = knob(filter_network())
    last: Gate = knob(filter_output())
    d: Gate = knob(filter_bias(), forms.const(0))
    length: int = knob(1024, 64)

    def __post_init__(self) -> None:
        width = self.last.slots
        if self.hidden.slots != width * width + 5 * width:
            raise InputError(f"{self.name}: hidden and last must have the same width")
        if self.length < 1:
            raise InputError(f"{self.name}.length must be at least 1, not {self.length}")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def channels(self, key_dim: int, value_dim: int) -> int:
        if key_dim != value_dim:
            raise InputError(
                f"rule '{self.name}' takes as many channels of the key as of the value, not {key_dim} and {value_dim}"
            )
        return value_dim

    def convolved(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Convolved:
        return Convolved(x=k * v, taps=lambda count: self._taps(count, gates), output=lambda y: q * y)

    def _taps(self, count: int, gates: Mapping[str, Tensor]) -> Tensor:
        """The filter of all heads at the lags 0 ... count - 1, [count, H, V]."""
        width = self.last.slots
        sizes = (3 * width, width, width * width, width)
        first, first_bias, second, second_bias = gates["hidden"].split(sizes, dim=-1)
        last = gates["last"].unflatten(-1, (-1, width))
        lag = torch.arange(count, device=last.device, dtype=last.dtype)[:, None] / self.length
        turn = 2 * math.pi * 1e-4 * lag
        features = torch.cat([lag, turn.cos(), -turn.sin()], dim=-1)
        x = torch.einsum("te,hew->thw", features, first.unflatten(-1, (3, width))) + first_bias
        x = torch.einsum("thw,hwx->thx", (x / 3**0.5).sin(), second.unflatten(-1, (width, width))) + second_bias
        x = torch.einsum("thw,hvw->thv", (x / width**0.5).sin(), last) / width**0.5
        rates = torch.linspace(SLOWEST, FASTEST, last.shape[1], device=last.device, dtype=last.dtype)
        now = torch.zeros_like(lag)
        now[0] = 1.0
        d = gates["d"] if gates["d"].dim() > 1 else gates["d"][:, None]
        return (-rates * lag).exp()[:, None] * x + now[..., None] * d

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
        past = torch.cat([state[0], (k * v)[:, :, None]], dim=2)
        width, count, channels = self.last.slots, past.shape[2], v.shape[-1]
        y = (d if d.dim() > 1 else d[:, None]) * k * v
        W1, b1 = hidden[:, : 3 * width].view(-1, 3, width), hidden[:, 3 * width : 4 * width]
        W2, b2 = hidden[:, 4 * width : -width].view(-1, width, width), hidden[:, -width:]
        for i in range(count):
            s = (count - 1 - i) / self.length
            e = hidden.new_tensor([s, math.cos(2e-4 * math.pi * s), -math.sin(2e-4 * math.pi * s)])
            x = ((e[:, None] * W1).sum(1) + b1) / math.sqrt(3)
            x = ((x.sin()[..., None] * W2).sum(1) + b2) / math.sqrt(width)
            h = (x.sin()[:, None] * last.view(-1, channels, width)).sum(-1) / math.sqrt(width)
            steps = max(channels - 1, 1)
            rates = hidden.new_tensor([SLOWEST + (FASTEST - SLOWEST) * j / steps for j in range(channels)])
            y = y + (-rates * s).exp() * h * past[:, :, i]
        return scale * q * y, (past,)
