"""sLSTM of xLSTM: a scalar memory for each channel, whose gates read the head's last output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate, parameterization
from deltalab.nonlinear import Drive, Nonlinear, exponential_lstm, lstm_state
from deltalab.rule import State, knob


@parameterization
def lstm_gate(low: float = 0.0, high: float = 0.0) -> Gate:
    """W x + c for each channel of the value, without bounds; c starts evenly spaced over the channels of a head."""
    return Gate(
        per="value_channel",
        low=-torch.inf,
        high=torch.inf,
        parameters={"bias": lambda shape, generator: torch.linspace(low, high, shape[-1]).expand(shape).clone()},
        value=lambda z, p: z + p["bias"],
    )


@parameterization
def lstm_input() -> Gate:
    """W x for each channel of the value, without bounds. A bias would have no effect: it cancels in c / n."""
    return Gate(per="value_channel", low=-torch.inf, high=torch.inf, value=lambda z, p: z)


@parameterization
def recurrent_matrices() -> Gate:
    """sqrt(V) R of z, i, f and o, learned for each head; it starts at 0."""
    return Gate(
        per="head_value_square",
        slots=4,
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.zeros(shape)},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class SLSTM(Nonlinear):
    """m_t = max(log f_t + m_{t-1}, i_t),   i_t = i + R_i h_{t-1}, and so with z, f and o
    c_t = exp(log f_t + m_{t-1} - m_t) c_{t-1} + exp(i_t - m_t) tanh(z_t),   z = v
    n_t = exp(log f_t + m_{t-1} - m_t) n_{t-1} + exp(i_t - m_t)
    output scale h_t,   h_t = sigmoid(o_t) * c_t / n_t,   log f_t = log sigmoid(f_t) or f_t

    Beck et al. 2024 (arXiv:2405.04517, Eq. 8-17), with R a matrix [V, V] for each head and gate. The state is
    (h, c, n, m). q is not read and k is not read: key_dim 1 makes their projections small. i, f and o read the layer's
    input, z the convolved v. r: const(0) leaves out the reading of the last output, and the rule is linear.

    Tokens follow each other. On a GPU a kernel takes heads of up to 64 channels.
    """

    name: ClassVar[str] = "slstm"
    paper: ClassVar[str] = "arXiv:2405.04517"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})
    kernel: ClassVar[Literal["lstm"] | None] = "lstm"

    i: Gate = knob(lstm_input(), forms.const(0))
    f: Gate = knob(lstm_gate(low=3.0, high=6.0))
    o: Gate = knob(lstm_gate())
    r: Gate = knob(recurrent_matrices(), forms.const(0))
    forget: str = knob("sigmoid", "exp")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    @property
    def log_sigmoid(self) -> bool:
        return self.forget == "sigmoid"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        return lstm_state(v)

    def drive(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Drive:
        width = v.shape[-1]
        i, f, o, r = (gates[name] if gates[name].dim() > 1 else gates[name][:, None] for name in ("i", "f", "o", "r"))
        matrices = r.expand(-1, 4 * width**2).unflatten(-1, (4, width, width))
        return Drive(torch.stack([v, *(x.expand(v.shape) for x in (i, f, o))], dim=3), width**-0.5 * matrices)

    def cell(self, token: Tensor, weights: Tensor, state: State) -> tuple[Tensor, State]:
        return exponential_lstm(token, weights, state, log_sigmoid=self.log_sigmoid)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        i: Tensor,
        f: Tensor,
        o: Tensor,
        r: Tensor,
    ) -> tuple[Tensor, State]:
        h, c, n, m = state
        width = v.shape[-1]
        i, f, o, r = (x if x.dim() > 1 else x[:, None] for x in (i, f, o, r))
        R = r.expand(-1, 4 * width * width).view(-1, 4, width, width) / width**0.5
        z, i, f, o = (x + (h[..., None] * R[:, n]).sum(-2) for n, x in enumerate((v, i, f, o)))
        f = f.sigmoid().log() if self.forget == "sigmoid" else f
        now = torch.maximum(f + m, i)
        c = (f + m - now).exp() * c + (i - now).exp() * z.tanh()
        n = (f + m - now).exp() * n + (i - now).exp()
        h = o.sigmoid() * c / n
        return scale * h, (h, c, n, now)
