"""S4D: a diagonal state space model with N complex states for each channel."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import Elementwise, Terms, zero_order_hold
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.rule import State, knob


@dataclass(frozen=True, kw_only=True)
class S4D(Elementwise):
    """h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A v_t,   A = -rate + i omega
    o_t = 2 scale Re sum_n C_n h_{t,n},   C = c + i d

    Gu et al. 2022 (arXiv:2206.11893, Section 3 and 4), S4D-Lin with B = 1 and zero-order hold. Each channel of v has n
    complex states, of half of their conjugate pairs, and an A, C and dt of its own. The skip D is the layer's. q is not
    read and k is not read: key_dim 1 makes their projections small. n is the `slots` of rate, omega, c and d.

    Training keeps 2 n numbers for each token and channel.
    """

    name: ClassVar[str] = "s4d"
    paper: ClassVar[str] = "arXiv:2206.11893"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})
    is_complex: ClassVar[bool] = True

    dt: Gate = knob(forms.channel_step(), forms.const(0.125))
    rate: Gate = knob(forms.slot_rate())
    omega: Gate = knob(forms.slot_frequency())
    c: Gate = knob(forms.slot_weight())
    d: Gate = knob(forms.slot_weight())

    def __post_init__(self) -> None:
        if len({gate.slots for gate in (self.rate, self.omega, self.c, self.d)}) > 1:
            raise InputError(f"{self.name}: rate, omega, c and d must have the same number of slots")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def channels(self, key_dim: int, value_dim: int) -> tuple[int, ...]:
        return (value_dim, self.rate.slots)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        rate, omega, c, d = (gates[name].unflatten(-1, (-1, self.rate.slots)) for name in ("rate", "omega", "c", "d"))
        a, write = zero_order_hold(gates["dt"][..., None], rate, omega)
        return Terms(
            a=a,
            b=write * v[..., None],
            output=lambda h: 2 * (c * h.real - d * h.imag).sum(-1),
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
        rate: Tensor,
        omega: Tensor,
        c: Tensor,
        d: Tensor,
    ) -> tuple[Tensor, State]:
        rate, omega, c, d = (x.unflatten(-1, (-1, self.rate.slots)) for x in (rate, omega, c, d))
        dt = dt[..., None] if dt.dim() > 1 else dt[:, None, None]
        A = torch.complex(-rate, omega)
        h = (dt * A).exp() * torch.complex(*state[0].unbind(-1)) + ((dt * A).exp() - 1) / A * v[..., None]
        return 2 * scale * (torch.complex(c, d) * h).real.sum(-1), (torch.view_as_real(h),)
