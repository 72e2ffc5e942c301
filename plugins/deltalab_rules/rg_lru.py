"""RG-LRU: a gated linear recurrence for each channel, the recurrent layer of Griffin and Hawk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.elementwise import LEAST_SQUARE, Elementwise, Terms, complement
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, knob


@parameterization
def rg_lru_decay(c: float = 8.0, low: float = 0.9, high: float = 0.999) -> Gate:
    """g = -c softplus(b), the logarithm of a^c for each head and channel; a^c starts uniform in [low, high]."""
    if c <= 0 or not 0 < low <= high < 1:
        raise InputError(f"rg_lru_decay takes c > 0 and 0 < low <= high < 1, not {c:g}, {low:g} and {high:g}")

    def start(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        rate = -torch.empty(shape).uniform_(low, high, generator=generator).log() / c
        return rate.expm1().log()

    return Gate(
        per="head_value_channel",
        low=-torch.inf,
        high=0.0,
        parameters={"bias": start},
        value=lambda z, p: -c * F.softplus(z + p["bias"]),
    )


@dataclass(frozen=True, kw_only=True)
class RGLRU(Elementwise):
    """h_t = alpha_t h_{t-1} + sqrt(1 - alpha_t^2) (i_t * v_t),   alpha_t = exp(r_t g),   o_t = scale h_t

    De et al. 2024 (arXiv:2402.19427, Eq. 1-4), with v as x, and g = c log a. All is element-wise over the channels of
    v. q is not read and k is not read: key_dim 1 makes their projections small. r and i read the layer's input by one
    matrix each, where theirs read x after the convolution by blocks. normalize: False leaves sqrt(1 - alpha_t^2) out.
    """

    name: ClassVar[str] = "rg_lru"
    paper: ClassVar[str] = "arXiv:2402.19427"
    ignores: ClassVar[frozenset[str]] = frozenset({"q", "k"})

    g: Gate = knob(rg_lru_decay())
    r: Gate = knob(forms.value_sigmoid(rank=0), forms.const(1))
    i: Gate = knob(forms.value_sigmoid(rank=0), forms.const(1))
    normalize: bool = knob(True, False)

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def terms(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], kept: State) -> Terms:
        g = (gates["r"] * gates["g"].clamp_min(-1e9)).expand(v.shape)  # 0 * -inf is not a number
        b = gates["i"] * v
        return Terms(a=g.exp(), b=complement(g) * b if self.normalize else b, output=lambda h: h)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, r: Tensor, i: Tensor
    ) -> tuple[Tensor, State]:
        r, i = (x if x.dim() > 1 else x[:, None] for x in (r, i))
        alpha = g.exp() ** r
        size = (1 - alpha**2).clamp_min(LEAST_SQUARE).sqrt() if self.normalize else 1.0
        h = alpha * state[0] + size * i * v
        return scale * h, (h,)
