"""H3: a diagonal state space model of k * v for each channel, read by q."""

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
class H3(Elementwise):
    """h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A (k_t * v_t),   A = -rate + i omega
    o_t = 2 scale q_t * Re sum_n C_n h_{t,n},   C = c + i d

    Fu et al. 2023 (arXiv:2212.14052, Algorithm 1) with heads of one channel, as in their models. All is element-wise
    over the channels, so that key_dim and value_dim are equal. Their shift SSM on k is the layer's convolution, of
    `conv` taps. The diagonal SSM is that of s4d. The skip D is left out. n is the `slots` of rate, omega, c and d.

    Training keeps 2 n numbers for each token and channel.
    """

    name: ClassVar[str] = "h3"
    paper: ClassVar[str] = "arXiv:2212.14052"
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
        if key_dim != value_dim:
            raise InputError(
                f"rule '{self.name}' takes as many channels of the key as of the value, not {key_dim} and {value_dim}"
            )
        return (value_dim, self.rate.slots)

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        rate, omega, c, d = (gates[name].unflatten(-1, (-1, self.rate.slots)) for name in ("rate", "omega", "c", "d"))
        a, write = zero_order_hold(gates["dt"][..., None], rate, omega)
        return Terms(
            a=a,
            b=write * (k * v)[..., None],
            output=lambda h: 2 * q * (c * h.real - d * h.imag).sum(-1),
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
        h = (dt * A).exp() * torch.complex(*state[0].unbind(-1)) + ((dt * A).exp() - 1) / A * (k * v)[..., None]
        return 2 * scale * q * (torch.complex(c, d) * h).real.sum(-1), (torch.view_as_real(h),)
