"""LRU: a linear recurrence with a fixed factor for each complex channel."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import LEAST_SQUARE, Elementwise, Terms, complement, paired, turning, unpaired
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, knob


@parameterization
def ring_decay(low: float = 0.0, high: float = 1.0) -> Gate:
    """g = -exp(nu), the logarithm of |lambda| for each head and pair of channels.

    |lambda| starts so that lambda is uniform on the ring between the radii low and high.
    """
    if not 0 <= low < high <= 1:
        raise InputError(f"ring_decay takes 0 <= low < high <= 1, not {low:g} and {high:g}")

    def start(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        square = low**2 + (high**2 - low**2) * torch.empty(shape).uniform_(1e-6, 1 - 1e-6, generator=generator)
        return (-square.log() / 2).log()

    return Gate(
        per="head_value_pair",
        low=-torch.inf,
        high=0.0,
        parameters={"nu": start},
        value=lambda z, p: z - p["nu"].exp(),
    )


@parameterization
def ring_angle(high: float = 2 * math.pi) -> Gate:
    """theta = exp(c), a learned angle for each head and pair of channels, which starts uniform in [0, high]."""
    if high <= 0:
        raise InputError(f"ring_angle.high must be positive, not {high:g}")
    return Gate(
        per="head_value_pair",
        low=0.0,
        high=torch.inf,
        parameters={"log": lambda shape, generator: torch.empty(shape).uniform_(1e-6, high, generator=generator).log()},
        value=lambda z, p: z + p["log"].exp(),
    )


@parameterization
def pair_factor() -> Gate:
    """exp(c), a learned positive factor for each head and pair of channels, which starts at 1."""
    return Gate(
        per="head_value_pair",
        low=0.0,
        high=torch.inf,
        parameters={"log": lambda shape, generator: torch.zeros(shape)},
        value=lambda z, p: z + p["log"].exp(),
    )


@dataclass(frozen=True, kw_only=True)
class LRU(Elementwise):
    """h_t = lambda h_{t-1} + gamma sqrt(1 - |lambda|^2) b_t,   lambda = exp(g + i theta)
    o_t = scale (Re h_t, Im h_t)

    Orvieto et al. 2023 (arXiv:2303.06349, Eq. 3 and 5-7). b_t is their B u_t: its real part is the first half of v's
    channels, its imaginary part the second half. Their C is the layer's output projection, D a skip of the layer.
    q is not read and k is not read: key_dim 1 makes their projections small. Their gamma starts at
    sqrt(1 - |lambda|^2), and is here the factor of this root, which therefore follows lambda.
    """

    name: ClassVar[str] = "lru"
    paper: ClassVar[str] = "arXiv:2303.06349"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})
    is_complex: ClassVar[bool] = True

    g: Gate = knob(ring_decay())
    theta: Gate = knob(ring_angle(), forms.const(0))
    gamma: Gate = knob(pair_factor(), forms.const(1))
    normalize: bool = knob(True, False)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        g, size = gates["g"], gates["gamma"]
        return Terms(
            a=turning(g.exp(), gates["theta"]),
            b=(size * complement(g) if self.normalize else size) * paired(v),
            output=lambda h: unpaired(h, v.shape[-1]),
        )

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, theta: Tensor, gamma: Tensor
    ) -> tuple[Tensor, State]:
        x, y = state[0].unbind(-1)
        theta, gamma = (part if part.dim() > 1 else part[:, None] for part in (theta, gamma))
        if self.normalize:
            gamma = gamma * (1 - (2 * g).exp()).clamp_min(LEAST_SQUARE).sqrt()
        imaginary = torch.zeros_like(x)
        imaginary[..., : v.shape[-1] - x.shape[-1]] = v[..., x.shape[-1] :]
        h_x = g.exp() * (theta.cos() * x - theta.sin() * y) + gamma * v[..., : x.shape[-1]]
        h_y = g.exp() * (theta.sin() * x + theta.cos() * y) + gamma * imaginary
        return scale * torch.cat([h_x, h_y], dim=-1)[..., : v.shape[-1]], (torch.stack([h_x, h_y], dim=-1),)
