"""Momentum DeltaNet: the delta rule moves a momentum, and the momentum the state, with all gates from the token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.coupled import Carry, carried, fused_carried, lacks_kernel, momentum
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.rule import State, UpdateRule, knob


@parameterization
def momentum_decay(least: float = -2.0) -> Gate:
    """m = -a softplus(W x + c), but at least `least`, with the starts of mamba2_decay."""
    if not least < 0:
        raise InputError(f"momentum_decay.least must be negative, not {least:g}")
    decay = forms.mamba2_decay()
    return Gate(
        per="token",
        low=float(least),
        high=0.0,
        parameters=decay.parameters,
        value=lambda z, p: decay.value(z, p).clamp_min(least),
    )


@parameterization
def balance(most: float = 4.0) -> Gate:
    """A positive number for each head, exp(c), whose start is uniform in [0, most]."""
    if not most > 0:
        raise InputError(f"balance.most must be positive, not {most:g}")
    return Gate(
        per="head",
        low=0.0,
        high=torch.inf,
        parameters={
            "log": lambda shape, generator: (
                torch.empty(shape).uniform_(0, most, generator=generator).clamp_min(1e-6).log()
            )
        },
        value=lambda z, p: z + p["log"].exp(),
    )


@dataclass(frozen=True, kw_only=True)
class MDN(UpdateRule):
    """w_t = v_t - (alpha_t k_t)^T S_{t-1}
    M_t = mu_t M_{t-1} - eta_t k_t w_t^T
    S_t = alpha_t S_{t-1} - b_t M_t,   o_t = scale S_t^T q_t
    alpha_t = exp(g_t) / (1 + r_t^2),   b_t = beta_t r_t^2 / (1 + r_t^2),   r_t = eta_t f,   mu_t = exp(m_t)

    "MDN: parallelizing stepwise momentum for delta linear attention" (arXiv:2605.05838), in the form of the authors'
    layer: alpha + b is at most 1, by an angle arctan(eta f) with f learned for each head. f is `f`. Their eta is
    1 + tanh(W x / sqrt(d)): twice a sigmoid, as here, with other units of W. Their layer also takes a learned part of k
    off q before both are normalized, which is left out. `momentum_deltanet` has constant gates and no decay of S.

    The state is (S, M). A token costs about what a delta rule with a state of 2 K key channels costs. The kernel
    carries the pair from chunk to chunk, forward and backward; what is parallel over chunks is PyTorch's, in fp32.
    """

    name: ClassVar[str] = "mdn"
    paper: ClassVar[str] = "arXiv:2605.05838"

    g: Gate = knob(forms.mamba2_decay(), forms.const(0))
    m: Gate = knob(momentum_decay(), momentum_decay(least=-8))
    beta: Gate = knob(forms.sigmoid(), forms.const(1))
    eta: Gate = knob(forms.sigmoid(max=2), forms.const(1))
    f: Gate = knob(balance(), forms.const(1))

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        S = v.new_zeros(v.shape[0], v.shape[2], k.shape[-1], v.shape[-1], dtype=dtype)
        return S, S.clone()

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        return self._carried(carried, q, k, v, gates, scale=scale, state=state)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        return self._carried(fused_carried, q, k, v, gates, scale=scale, state=state)

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return lacks_kernel(k, v)

    def _carried(
        self,
        carry: Carry,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        *,
        scale: float,
        state: State,
    ) -> tuple[Tensor, State]:
        S, M = state
        g, m, beta, eta = (gates[name].expand(k.shape[:3]).to(S.dtype) for name in ("g", "m", "beta", "eta"))
        ratio = (eta * gates["f"]).square()
        g, beta = g - ratio.log1p(), beta * ratio / (1 + ratio)
        return momentum(q, k, v, g=g, m=m, beta=beta, eta=eta, scale=scale, state=(S, M), carry=carry)

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        state: State,
        g: Tensor,
        m: Tensor,
        beta: Tensor,
        eta: Tensor,
        f: Tensor,
    ) -> tuple[Tensor, State]:
        S, M = state
        angle = torch.arctan(eta * f)
        alpha, b = (g.exp() * angle.cos().square())[..., None, None], (beta * angle.sin().square())[..., None, None]
        w = v - torch.einsum("bhk,bhkv->bhv", k, alpha * S)
        M = m.exp()[..., None, None] * M - (eta[..., None] * k)[..., None] * w[..., None, :]
        S = alpha * S - b * M
        return scale * torch.einsum("bhk,bhkv->bhv", q, S), (S, M)
