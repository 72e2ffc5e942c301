"""The recurrent fast-weight programmer: a delta rule whose q, k, v and beta read the head's last output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.nonlinear import Drive, Nonlinear
from deltalab.rule import State, knob


@parameterization
def unbounded_strength() -> Gate:
    """W x for each head, without bounds: the rule takes the sigmoid after it has added what the output says."""
    return Gate(per="token", low=-torch.inf, high=torch.inf, value=lambda z, p: z)


@parameterization
def recurrent_projections() -> Gate:
    """sqrt(V) R of q, k and v, learned for each head; R starts normal with a standard deviation of 1 / sqrt(V)."""
    return Gate(
        per="head_value_square",
        slots=3,
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.empty(shape).normal_(generator=generator)},
        value=lambda z, p: z + p["value"],
    )


@parameterization
def recurrent_strength() -> Gate:
    """sqrt(V) w of beta, learned for each head; w starts normal with a standard deviation of 1 / sqrt(V)."""
    return Gate(
        per="head_value_channel",
        low=-torch.inf,
        high=torch.inf,
        parameters={"value": lambda shape, generator: torch.empty(shape).normal_(generator=generator)},
        value=lambda z, p: z + p["value"],
    )


@dataclass(frozen=True, kw_only=True)
class RecurrentFastWeights(Nonlinear):
    """S_t = S_{t-1} + beta_t k_t (v'_t - S_{t-1}^T k_t)^T,   y_t = S_t^T q_t,   output scale y_t
    q_t = softmax(q + R_q^T tanh(y_{t-1})),   k_t = softmax(k + R_k^T tanh(y_{t-1})),   v'_t = v + R_v^T tanh(y_{t-1})
    beta_t = sigmoid(b_t + w^T tanh(y_{t-1}))

    Irie et al. 2021 (arXiv:2106.06295, the recurrent delta network), with R a matrix [V, V] for each head, as in the
    authors' code; so key_dim and value_dim are equal, and the scale is 1. The state is (S, y). r: const(0) and
    w: const(0) leave out the reading of the last output: the rest is a delta rule on softmax keys.

    Tokens follow each other, and no kernel computes them: training takes a loop over tokens.
    """

    name: ClassVar[str] = "recurrent_fast_weights"
    paper: ClassVar[str] = "arXiv:2106.06295"

    b: Gate = knob(unbounded_strength())
    r: Gate = knob(recurrent_projections(), forms.const(0))
    w: Gate = knob(recurrent_strength(), forms.const(0))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "raw"

    def scale(self, key_dim: int) -> float:
        return 1.0

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        width, batch, heads = v.shape[-1], v.shape[0], v.shape[2]
        if k.shape[-1] != width:
            raise InputError(
                f"rule '{self.name}' takes as many channels of the key as of the value, not {k.shape[-1]} and {width}"
            )
        dtype = torch.promote_types(v.dtype, torch.float32)
        return v.new_zeros(batch, heads, width, width, dtype=dtype), v.new_zeros(batch, heads, width, dtype=dtype)

    def drive(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Drive:
        width = v.shape[-1]
        r, w = (gates[name] if gates[name].dim() > 1 else gates[name][:, None] for name in ("r", "w"))
        of_qkv = r.expand(-1, 3 * width**2).unflatten(-1, (3, width, width)).transpose(1, 2).flatten(2)
        weights = torch.cat([of_qkv, w.expand(-1, width)[..., None]], dim=-1)
        return Drive(torch.cat([q, k, v, gates["b"][..., None]], dim=-1), width**-0.5 * weights)

    def cell(self, token: Tensor, weights: Tensor, state: State) -> tuple[Tensor, State]:
        S, y = state
        width = y.shape[-1]
        q, k, v, b = (token + torch.einsum("bhv,hvw->bhw", y.tanh(), weights)).split([width, width, width, 1], dim=-1)
        q, k = q.softmax(-1), k.softmax(-1)
        error = v - torch.einsum("bhk,bhkv->bhv", k, S)
        S = S + torch.einsum("bhk,bhv->bhkv", k, b.sigmoid() * error)
        y = torch.einsum("bhk,bhkv->bhv", q, S)
        return y, (S, y)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, b: Tensor, r: Tensor, w: Tensor
    ) -> tuple[Tensor, State]:
        S, y = state
        width = v.shape[-1]
        read = y.tanh()[..., None] / width**0.5
        r, w = (x if x.dim() > 1 else x[:, None] for x in (r, w))
        R = r.expand(-1, 3 * width * width).view(-1, 3, width, width)
        q, k, v = (x + (read * R[:, n]).sum(-2) for n, x in enumerate((q, k, v)))
        q, k = q.softmax(-1), k.softmax(-1)
        beta = (b + (read[..., 0] * w).sum(-1)).sigmoid()
        S = S + beta[..., None, None] * k[..., None] * (v - (S * k[..., None]).sum(-2))[..., None, :]
        y = (S * q[..., None]).sum(-2)
        return scale * y, (S, y)
