"""Memora of MIRAS: a memory of positive numbers with a fixed sum, which a gradient step multiplies."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.gates import Gate
from deltalab.nonlinear import Drive, Nonlinear
from deltalab.rule import State, knob

AXES = {"matrix": (-2, -1), "value": (-2,), "key": (-1,)}
"""The axes of W [.., K, V] over which a softmax goes."""


@dataclass(frozen=True, kw_only=True)
class Memora(Nonlinear):
    """W_t = mass softmax(alpha_t log W_{t-1} - beta_t k_t (W_{t-1}^T k_t - v_t)^T),   alpha_t = exp(g_t)
    o_t = scale W_t^T q_t

    Behrouz et al. 2025 (arXiv:2504.13173, Eq. 21 and 27): gradient descent on the l_2 attentional bias with a KL
    divergence from the last memory as retention and an entropy as forgetting, whose factor 2 is in beta. Their memory
    is a normalized MLP with a softmax for each slice of its weights, here it is a matrix, and alpha and beta are
    numbers of the head, not of its channels. A token multiplies W by exp(-beta k e^T): beta may well exceed 1 here.

    simplex: what the softmax goes over. `matrix` is all K V numbers, Eq. 21; `value` is the K numbers that make a
    channel of the output, `key` the V numbers that a channel of the key reaches. The mass is such that all of W sums to
    c V. W is uniform at first, and its numbers stay positive. The state is log (W / mass), [B, H, K, V].

    Tokens follow each other, and no kernel computes them: training takes a loop over tokens.
    """

    name: ClassVar[str] = "memora"
    paper: ClassVar[str] = "arXiv:2504.13173"

    g: Gate = knob(forms.mamba2_decay(), forms.gla_decay(), forms.const(0))
    beta: Gate = knob(forms.sigmoid(max=4))
    simplex: str = knob("matrix", "value", "key")
    c: float = knob(1.0, 8.0, 0.1)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        zeros = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype)
        return (self._normalized(zeros),)

    def _normalized(self, logits: Tensor) -> Tensor:
        return logits - logits.logsumexp(AXES[self.simplex], keepdim=True)

    def _memory(self, log: Tensor) -> Tensor:
        K, V = log.shape[-2:]
        mass = self.c * {"matrix": V, "value": 1.0, "key": V / K}[self.simplex]
        return mass * log.exp()

    def drive(self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor]) -> Drive:
        alpha, beta = (gates[name].expand(k.shape[:3])[..., None] for name in ("g", "beta"))
        return Drive(torch.cat([q, k, v, alpha.exp(), beta], dim=-1), q.new_empty(q.shape[2], 0))

    def cell(self, token: Tensor, weights: Tensor, state: State) -> tuple[Tensor, State]:
        (log,) = state
        q, k, v, alpha, beta = token.split([log.shape[-2], log.shape[-2], log.shape[-1], 1, 1], dim=-1)
        error = torch.einsum("bhk,bhkv->bhv", k, self._memory(log)) - v
        log = self._normalized(alpha[..., None] * log - torch.einsum("bhk,bhv->bhkv", k, beta * error))
        return torch.einsum("bhk,bhkv->bhv", q, self._memory(log)), (log,)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, State]:
        K, V = k.shape[-1], v.shape[-1]
        slices = {"matrix": 1, "value": V, "key": K}[self.simplex]
        log_W = state[0] + math.log(self.c * V / slices)
        gradient = k[..., None] * ((k[..., None] * log_W.exp()).sum(-2) - v)[..., None, :]
        g, beta = (gate.expand(k.shape[:2])[..., None, None] for gate in (g, beta))
        logits = g.exp() * log_W - beta * gradient
        if self.simplex == "matrix":
            W = logits.flatten(-2).softmax(-1).view_as(logits)
        else:
            W = logits.softmax(-2 if self.simplex == "value" else -1)
        return scale * (self.c * V / slices * W * q[..., None]).sum(-2), (W.log(),)
