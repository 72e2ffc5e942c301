"""RWKV-4: a mean of the values so far, weighed by exp(k) and by how long ago they were, channel by channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import Elementwise, Terms, running_max
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, knob


@parameterization
def rwkv4_decay(low: float = -5.0, high: float = 3.0) -> Gate:
    """g = -exp(c), a learned log-decay for each head and channel; c starts as a ramp over the channels of a head."""
    return Gate(
        per="head_value_channel",
        low=-torch.inf,
        high=0.0,
        parameters={"log": lambda shape, generator: torch.linspace(low, high, shape[-1]).expand(shape).clone()},
        value=lambda z, p: z - p["log"].exp(),
    )


@parameterization
def value_bonus(init: float = -1.2) -> Gate:
    """A learned number for each head and channel of the value, without bounds, starting at `init`, the log of 0.3."""
    return Gate(
        per="head_value_channel",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.full(shape, float(init))},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class RWKV4(Elementwise):
    """o_t = scale sigmoid(q_t) * (x_{t-1} + exp(u + k_t) v_t) / (y_{t-1} + exp(u + k_t))
    x_t = exp(g) x_{t-1} + exp(k_t) v_t,   y_t = exp(g) y_{t-1} + exp(k_t)

    Peng et al. 2023 (arXiv:2305.13048, Eq. 14-16, with r as q, and g = -w): the state alone, without token shift. All
    is element-wise over the channels, so that key_dim and value_dim are equal. The state is (x, y) exp(-m) and
    m_t = max(g + m_{t-1}, k_t), which o does not depend on. u: const(0) weighs the token itself as later tokens do.
    """

    name: ClassVar[str] = "rwkv4"
    paper: ClassVar[str] = "arXiv:2305.13048"

    g: Gate = knob(rwkv4_decay(), forms.const(0))
    u: Gate = knob(value_bonus(), forms.const(0))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def channels(self, key_dim: int, value_dim: int) -> tuple[int, ...]:
        if key_dim != value_dim:
            raise InputError(
                f"rule '{self.name}' takes as many channels of the key as of the value, not {key_dim} and {value_dim}"
            )
        return (2, value_dim)

    def kept(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        return (v.new_full((v.shape[0], v.shape[2], v.shape[3]), -torch.inf, dtype=dtype),)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        g, now = gates["g"].expand(k.shape).to(k), gates["u"] + k
        m = running_max(k, g, kept[0])
        before = torch.cat([kept[0][:, None], m[:, :-1]], dim=1)
        write = (k - m).exp()

        def output(h: Tensor) -> Tensor:
            most = torch.maximum(before, now)
            past, own = (before - most).exp(), (now - most).exp()
            x, y = h.unbind(-2)
            return q.sigmoid() * (past * x + own * v) / (past * y + own)

        return Terms(
            a=(g + before - m).exp()[..., None, :].expand(*k.shape[:3], 2, -1),
            b=torch.stack([write * v, write], dim=-2),
            output=output,
            before=True,
            kept=(m[:, -1],),
        )

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, u: Tensor
    ) -> tuple[Tensor, State]:
        h, m = state
        g, u = (part if part.dim() > 1 else part[:, None] for part in (g, u))
        most = torch.maximum(m, u + k)
        past, own = (m - most).exp(), (u + k - most).exp()
        x, y = h.unbind(-2)
        o = scale * q.sigmoid() * (past * x + own * v) / (past * y + own)
        m_now = torch.maximum(g + m, k)
        past, own = (g + m - m_now).exp(), (k - m_now).exp()
        return o, (torch.stack([past * x + own * v, past * y + own], dim=-2), m_now)
