"""HGRN: a gated linear recurrence for each complex channel, whose angle is learned and whose size is a forget gate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import Elementwise, Terms, paired, turning, unpaired
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, knob


@parameterization
def pair_sigmoid() -> Gate:
    """A gate sigmoid(W x) for each pair of channels of the value."""
    return Gate(per="value_pair", low=0.0, high=1.0, value=lambda z, p: z.sigmoid())


@parameterization
def pair_angle(base: float = 10000.0) -> Gate:
    """A learned angle for each head and pair of channels; that of pair j of n starts at base^(-j / n), as in RoPE."""

    def start(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return (base ** -(torch.arange(shape[-1]) / shape[-1])).expand(shape).clone()

    return Gate(
        per="head_value_pair",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": start},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class HGRN(Elementwise):
    """h_t = lambda_t exp(i theta) h_{t-1} + (1 - lambda_t) c_t,   lambda_t = low + (1 - low) f_t
    o_t = scale (Re h_t, Im h_t)

    Qin et al. 2023 (arXiv:2311.04823, Eq. 1-8). c_t is complex: its real part is the first half of v's channels, its
    imaginary part the second half. q is not read and k is not read: key_dim 1 makes their projections small. low is the
    lower bound of the forget gate, a number of its own for each layer, which the paper learns to rise from layer to
    layer. Their output gate and norm are the layer's. theta: const(0) keeps every channel real.
    """

    name: ClassVar[str] = "hgrn"
    paper: ClassVar[str] = "arXiv:2311.04823"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})
    is_complex: ClassVar[bool] = True

    f: Gate = knob(pair_sigmoid())
    theta: Gate = knob(pair_angle(), forms.const(0))
    low: Gate = knob(forms.const(0), forms.const(0.5))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "silu"

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        forget = 1 - (1 - gates["low"]) * (1 - gates["f"])
        return Terms(
            a=turning(forget, gates["theta"]),
            b=(1 - forget) * paired(v),
            output=lambda h: unpaired(h, v.shape[-1]),
        )

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, f: Tensor, theta: Tensor, low: Tensor
    ) -> tuple[Tensor, State]:
        x, y = state[0].unbind(-1)
        theta = theta if theta.dim() > 1 else theta[:, None]
        forget = low[:, None] + (1 - low[:, None]) * f
        real, imaginary = v[..., : x.shape[-1]], torch.zeros_like(x)
        imaginary[..., : v.shape[-1] - x.shape[-1]] = v[..., x.shape[-1] :]
        h_x = forget * (theta.cos() * x - theta.sin() * y) + (1 - forget) * real
        h_y = forget * (theta.sin() * x + theta.cos() * y) + (1 - forget) * imaginary
        return scale * torch.cat([h_x, h_y], dim=-1)[..., : v.shape[-1]], (torch.stack([h_x, h_y], dim=-1),)
