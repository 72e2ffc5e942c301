"""Differential attention: the difference of two softmax attentions, which share their values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, UpdateRule, knob
from deltalab.softmax import attend

EPS = 1e-5
"""Added to a mean of squares."""


@parameterization
def normal_head_channel(std: float = 0.1) -> Gate:
    """A learned number for each channel of each head, without bounds, which starts normal with deviation `std`."""
    # From zeros, lq^T lk would have no gradient.
    if std <= 0:
        raise InputError(f"normal_head_channel.std must be positive, not {std:g}")
    return Gate(
        per="head_channel",
        low=-math.inf,
        high=math.inf,
        parameters={"value": lambda shape, generator: torch.empty(shape).normal_(std=std, generator=generator)},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class DifferentialAttention(UpdateRule):
    """o_t = (1 - lambda_init) norm(sum_i (a_i - lambda a'_i) v_i) over i <= t, or over the last `window` tokens
    a_i = softmax_i(scale q1_t^T k1_i),   a'_i = softmax_i(scale q2_t^T k2_i),   scale = (K / 2)^(-1/2)
    lambda = exp(lq1^T lk1) - exp(lq2^T lk2) + lambda_init,   norm(o) = o / (mean(o^2) + eps)^(1/2)

    Ye et al. 2024 (arXiv:2410.05258, Eq. 1-3). q1, k1, lq1, lk1 are the even channels of q, k, lq, lk, and q2, k2, lq2,
    lk2 the odd ones, so that K is even. RoPE then turns each half by itself if 4 divides K: q1 and k1 as a head of
    width K / 2, q2 and k2 by base^(-2 / K) of these angles.

    In the paper, lambda_init is 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l = 1, 2, ..., from 0.2 up to 0.8. A rule does not
    know its layer, so that lambda_init is a fixed number here; an entry of `model.layers` may give each layer its own.
    The heads of the paper's layer share one lambda, here each has its own. The norm has no weights. norm: false leaves
    out the norm and the factor, which an `output_norm` of the layer would cancel. window 0 is no window. The state is
    the keys, their even channels first, and the values that later tokens can see: [B, H, n, K] and [B, H, n, V].
    """

    name: ClassVar[str] = "differential_attention"
    paper: ClassVar[str] = "arXiv:2410.05258"
    published = {
        "source": "Diff-Transformer/multihead_diffattn.py of microsoft/unilm",
        "layer": {"conv": 0, "rope": True, "output_norm": False, "output_gate": False},
        "lacks": "lambda_init by layer, one lambda for all heads, weights of the norm, the same RoPE for both halves",
    }

    lq: Gate = knob(normal_head_channel())
    lk: Gate = knob(normal_head_channel())
    lambda_init: float = knob(0.8, 0.5, 0.0)
    norm: bool = knob(True, False)
    window: int = knob(0, 16)

    def __post_init__(self) -> None:
        if self.lambda_init >= 1:
            raise InputError(f"{self.name}.lambda_init must be less than 1, not {self.lambda_init:g}")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def scale(self, key_dim: int) -> float:
        return float((key_dim / 2) ** -0.5)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        batch, _, heads, key_dim = k.shape
        if key_dim % 2:
            raise InputError(f"rule '{self.name}' takes an even number of channels of the key, not {key_dim}")
        return k.new_empty(batch, heads, 0, key_dim), v.new_empty(batch, heads, 0, v.shape[-1])

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        keys, values = (
            torch.cat([past, new.transpose(1, 2)], dim=2) if past.shape[2] else new.transpose(1, 2)
            for past, new in zip(state, (_even_first(k), v), strict=True)
        )
        halves = zip(_even_first(q).transpose(1, 2).chunk(2, dim=-1), keys.chunk(2, dim=-1), strict=True)
        one, other = (attend(q, k, values, window=self.window, scale=scale) for q, k in halves)
        o = self._normed(one - self._lambda(gates["lq"], gates["lk"])[:, None, None] * other)
        return o.to(v.dtype).transpose(1, 2), self._kept(keys, values)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: Any, **gates: Tensor
    ) -> tuple[Tensor, State]:
        keys, values = state
        keys, values = torch.cat([keys, _even_first(k)[:, :, None]], dim=2), torch.cat([values, v[:, :, None]], dim=2)
        one, other = (
            (scale * torch.einsum("bhk,bhnk->bhn", q, k)).softmax(-1)
            for q, k in zip(_even_first(q).chunk(2, dim=-1), keys.chunk(2, dim=-1), strict=True)
        )
        weights = one - self._lambda(gates["lq"], gates["lk"])[:, None] * other
        return self._normed(torch.einsum("bhn,bhnv->bhv", weights, values)), self._kept(keys, values)

    def _lambda(self, lq: Tensor, lk: Tensor) -> Tensor:
        """Returns lambda [H]."""
        products = lq * lk
        return products[..., ::2].sum(-1).exp() - products[..., 1::2].sum(-1).exp() + self.lambda_init

    def _normed(self, o: Tensor) -> Tensor:
        return (1 - self.lambda_init) * F.rms_norm(o, o.shape[-1:], eps=EPS) if self.norm else o

    def _kept(self, keys: Tensor, values: Tensor) -> State:
        """Returns the keys and values that the next token can see."""
        # With a window, the next token sees itself and window - 1 more.
        first = max(keys.shape[2] - self.window + 1, 0) if self.window else 0
        return keys[:, :, first:], values[:, :, first:]


def _even_first(x: Tensor) -> Tensor:
    """Returns x [..., K] with channels 0, 2, ... before 1, 3, ..., as flash attention wants each half to lie."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1)
