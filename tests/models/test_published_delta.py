"""Holds the presets of delta rules to the blocks of the authors' code."""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.published_block import (
    HEADS,
    STEP_SIZES,
    PublishedBlock,
    decay,
    projected,
    rms,
    unit,
)

DECAY_FROM_0: Mapping[str, tuple[float, float]] = {
    "gates.learned.g.log_a": (-math.inf, math.log(16)),
    "gates.learned.g.dt_bias": STEP_SIZES,
    "conv": (-0.5, 0.5),
    "norm.weight": (1.0, 1.0),
}


def delta(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A write of FLA's fused_recurrent_delta_rule: state [B, H, K, V] += k (beta (v - state^T k))^T."""
    error = v - torch.einsum("bhk,bhkv->bhv", k, state)
    return state + k[..., None] * (beta[..., None] * error)[..., None, :]


def read(state: Tensor, q: Tensor) -> Tensor:
    return torch.einsum("bhk,bhkv->bhv", q, state) * q.shape[-1] ** -0.5


class TestGatedDeltaNet(PublishedBlock):
    """fla/layers/gated_deltanet.py: a from 0 to 16, SiLU and l2 norm of q and k, swish gate after the norm."""

    rule = "gated_deltanet"
    starts: ClassVar = DECAY_FROM_0

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k = unit(q), unit(k)
        beta, alpha = (x @ p["gates.project.beta.weight"].T).sigmoid(), decay(p, x).exp()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = delta(alpha[:, t, :, None, None] * state, k[:, t], v[:, t], beta[:, t])
            outputs.append(read(state, q[:, t]))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestDeltaNet(PublishedBlock):
    """fla/layers/delta_net.py: no decay and no output gate."""

    rule = "deltanet"

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k, beta = unit(q), unit(k), (x @ p["gates.project.beta.weight"].T).sigmoid()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = delta(state, k[:, t], v[:, t], beta[:, t])
            outputs.append(read(state, q[:, t]))
        return rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2) @ p["out.weight"].T


class TestDeltaProduct(PublishedBlock):
    """fla/layers/gated_deltaproduct.py: two writes for each token, beta up to 2, the decay before the first of them."""

    rule = "delta_product"
    starts: ClassVar = DECAY_FROM_0

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x, steps=2))
        q, k, v = unit(q), unit(k).unflatten(2, (2, HEADS)), v.unflatten(2, (2, HEADS))
        beta = 2 * (x @ p["gates.project.beta.weight"].T).sigmoid().unflatten(-1, (2, HEADS))
        alpha = decay(p, x).exp()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            state = alpha[:, t, :, None, None] * state
            for n in range(2):
                state = delta(state, k[:, t, n], v[:, t, n], beta[:, t, n])
            outputs.append(read(state, q[:, t]))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * F.silu(x @ p["gate.weight"].T)) @ p["out.weight"].T


class TestComba(PublishedBlock):
    """fla/layers/comba.py: p = sigmoid(decay) k, q - D p, with both norms before them (see `lacks`)."""

    rule = "comba"
    starts: ClassVar = {
        **DECAY_FROM_0,
        "gates.learned.b.logit": (1.0, 1.0),
        "gates.learned.d.value": (1.0, 1.0),
    }

    def loop(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = map(F.silu, projected(p, x))
        q, k = unit(q), unit(k)
        fed = k * p["gates.learned.b.logit"].sigmoid()[:, None]
        q = q - p["gates.learned.d.value"][:, None] * fed
        beta, alpha = (x @ p["gates.project.beta.weight"].T).sigmoid(), decay(p, x).exp()
        state, outputs = x.new_zeros(len(x), HEADS, q.shape[-1], v.shape[-1]), []
        for t in range(x.shape[1]):
            predicted = torch.einsum("bhk,bhkv->bhv", fed[:, t], state)  # of the undecayed state
            new = beta[:, t, :, None] * (v[:, t] - predicted)
            state = alpha[:, t, :, None, None] * state + k[:, t, :, :, None] * new[:, :, None, :]
            outputs.append(read(state, q[:, t]))
        o = rms(torch.stack(outputs, 1), p["norm.weight"]).flatten(-2)
        return (o * (x @ p["gate.weight"].T).sigmoid()) @ p["out.weight"].T
