"""S5: one diagonal state space model over all channels of a head, whose complex states are pairs of channels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import Elementwise, Terms, paired, unpaired, zero_order_hold
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, knob


@parameterization
def pair_rate(init: float = 0.5) -> Gate:
    """-Re Lambda, learned as exp(c) for each head and pair of channels; it starts at `init`, as in HiPPO-N."""
    return Gate(
        per="head_value_pair",
        low=0.0,
        high=torch.inf,
        parameters={"log": lambda shape, generator: torch.full(shape, float(init)).log()},
        value=lambda z, p: z + p["log"].exp(),
    )


def _hippo(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """The positive imaginary parts of the eigenvalues of HiPPO-N with 2 n states, for the n pairs of a head."""
    return _frequencies(shape[-1]).float().expand(shape).clone()


def _frequencies(pairs: int) -> Tensor:
    """The positive omega_m of sum_j atan(2 omega_m / (2 j + 1)) = (m + 1/2) pi over j < 2 n, m = 0 ... n - 1, in fp64.

    HiPPO-N is S with u_i u_j / 2 above its diagonal and -u_i u_j / 2 below, u_j^2 = 2 j + 1. If S x = i omega x, the
    sum of u x behind j less that before j is multiplied by (2 i omega - u_j^2) / (2 i omega + u_j^2) at j. It begins
    as the sum of all and ends as minus that, so that the product of these factors is -1.
    """
    states, target = 2 * pairs, (torch.arange(pairs, dtype=torch.float64) + 0.5) * torch.pi
    # The sum is concave: from below, Newton's steps never pass the root.
    guesses = torch.logspace(-2, 2 * math.log10(states) + 1, 4096, dtype=torch.float64)
    omega = guesses[torch.searchsorted(_angles(guesses, states)[0], target) - 1]
    for _ in range(5):
        angles, slopes = _angles(omega, states)
        omega = omega + (target - angles) / slopes
    return omega


def _angles(omega: Tensor, states: int) -> tuple[Tensor, Tensor]:
    """The sum over j < `states` of atan(omega / (j + 1/2)), and its derivative.

    The sum is the angle of Gamma(states + 1/2 + i omega) / Gamma(1/2 + i omega). Of its terms, 16 are added one by one,
    and Stirling's series has the rest.
    """
    first = min(states, 16)
    rows = torch.arange(first, dtype=torch.float64) + 0.5
    angles, slopes = torch.atan(omega[:, None] / rows).sum(-1), (rows / (rows**2 + omega[:, None] ** 2)).sum(-1)
    ends = [torch.complex(torch.full_like(omega, end + 0.5), omega) for end in (first, states)]
    low, high = ((z - 0.5) * z.log() - z + 1 / (12 * z) - 1 / (360 * z**3) + 1 / (1260 * z**5) for z in ends)
    low_slope, high_slope = (z.log() - 1 / (2 * z) - 1 / (12 * z**2) for z in ends)
    return angles + (high - low).imag, slopes + (high_slope - low_slope).real


@parameterization
def hippo_frequency() -> Gate:
    """Im Lambda, a learned frequency for each head and pair of channels, which starts as HiPPO-N's eigenvalues."""
    return Gate(
        per="head_value_pair",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": _hippo},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class S5(Elementwise):
    """h_t = exp(dt A) h_{t-1} + (exp(dt A) - 1) / A b_t,   A = -rate + i omega
    o_t = scale (Re h_t, Im h_t)

    Smith et al. 2023 (arXiv:2208.04933, Section 3), with zero-order hold and a block of HiPPO-N for each head. b_t is
    their B u_t: its real part is the first half of v's channels, its imaginary part the second half. Their C is the
    layer's output projection, D a skip of the layer. B and C start as the layer's matrices do, not in the basis of
    HiPPO-N. q is not read and k is not read: key_dim 1 makes their projections small.
    """

    name: ClassVar[str] = "s5"
    paper: ClassVar[str] = "arXiv:2208.04933"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})
    is_complex: ClassVar[bool] = True

    dt: Gate = knob(forms.pair_step(), forms.const(0.125))
    rate: Gate = knob(pair_rate())
    omega: Gate = knob(hippo_frequency())

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        a, write = zero_order_hold(gates["dt"], gates["rate"], gates["omega"])
        return Terms(a=a, b=write * paired(v), output=lambda h: unpaired(h, v.shape[-1]))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, dt: Tensor, rate: Tensor, omega: Tensor
    ) -> tuple[Tensor, State]:
        dt = dt if dt.dim() > 1 else dt[:, None]
        A, half = torch.complex(-rate, omega), rate.shape[-1]
        b = v[..., :half].to(A.dtype)
        b[..., : v.shape[-1] - half] += 1j * v[..., half:]
        h = (dt * A).exp() * torch.complex(*state[0].unbind(-1)) + ((dt * A).exp() - 1) / A * b
        return scale * torch.cat([h.real, h.imag], dim=-1)[..., : v.shape[-1]], (torch.view_as_real(h),)
