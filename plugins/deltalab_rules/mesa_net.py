"""MesaNet: each token's output is a regression with a learned ridge per channel, solved by conjugate gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.ridge import fused_regression, lacks_kernel, regression
from deltalab.rule import State, UpdateRule, knob
from deltalab.structure import Ridge

LEAST = 1e-20
"""Added to beta under its root, whose slope at 0 is infinite. The root times its slope, 1 / 2, stays exact."""


@parameterization
def channel_ridge(init: float = 1.0, least: float = 0.25) -> Gate:
    """Lambda = least + softplus(c) with a learned c for each channel of the key, starting at Lambda = `init`."""
    if not 0 < least < init:
        raise InputError(f"channel_ridge takes 0 < least < init, not least {least:g} and init {init:g}")
    start = torch.tensor(init - least, dtype=torch.float64).expm1().log().item()
    return Gate(
        per="head_channel",
        low=float(least),
        high=torch.inf,
        parameters={"c": lambda shape, generator: torch.full(shape, start)},
        value=lambda z, p: least + F.softplus(z + p["c"]),
    )


@parameterization
def biased_sigmoid() -> Gate:
    """sigmoid(W x + c) with a learned c for each head, which starts at 0."""
    return Gate(
        per="token",
        low=0.0,
        high=1.0,
        parameters={"bias": lambda shape, generator: torch.zeros(shape)},
        value=lambda z, p: (z + p["bias"]).sigmoid(),
    )


@dataclass(frozen=True, kw_only=True)
class MesaNet(UpdateRule):
    """H_t = alpha_t H_{t-1} + beta_t k_t k_t^T
    U_t = alpha_t U_{t-1} + beta_t k_t v_t^T
    o_t = scale U_t^T x_t,   (H_t + diag(Lambda)) x_t = q_t,   alpha_t = exp(g_t)

    von Oswald et al. 2025 (arXiv:2506.05233): U is their G transposed. x_t has `iterations` steps of conjugate
    gradient, which is exact from K steps on. Lambda does not change in time, so that with
    k' = sqrt(beta) Lambda^(-1/2) k, v' = sqrt(beta) v and q' = Lambda^(-1/2) q the system is GKA's with a ridge of 1,
    and GKA's kernel solves it. The state is (H, U). Gradients are those of the exact solution.
    A token costs 3 K^2 an iteration.
    """

    name: ClassVar[str] = "mesa_net"
    paper: ClassVar[str] = "arXiv:2506.05233"
    published = {
        "source": "fla/layers/mesa_net.py of fla-org/flash-linear-attention",
        "knobs": {"g": "biased_decay", "beta": "biased_sigmoid"},
        "layer": {"features": "unit_qk", "scale": 1.0, "output_gate": False},
        "lacks": "v without convolution: here the convolution takes v, too, and only its SiLU is left out",
    }

    g: Gate = knob(forms.mamba2_decay(), forms.gla_decay(), forms.const(0), forms.biased_decay())
    beta: Gate = knob(forms.sigmoid(), forms.const(1), biased_sigmoid())
    ridge: Gate = knob(channel_ridge(), forms.const(1))
    iterations: int = knob(30, 2, 1)

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        batch, _, heads, key_dim = k.shape
        gram, memory = (v.new_zeros(batch, heads, key_dim, n, dtype=dtype) for n in (key_dim, v.shape[-1]))
        return gram, memory

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        return self._solve(regression, q, k, v, gates, scale=scale, state=state)

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        return self._solve(fused_regression, q, k, v, gates, scale=scale, state=state)

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return lacks_kernel(self._regression, k, v)

    def _solve(
        self,
        solve: Callable[..., tuple[Tensor, State]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Mapping[str, Tensor],
        *,
        scale: float,
        state: State,
    ) -> tuple[Tensor, State]:
        gram, memory = state
        heads, key_dim = k.shape[2:]
        ridge = gates["ridge"]
        root = (ridge if ridge.dim() == 2 else ridge[:, None].expand(heads, key_dim)).to(memory.dtype).sqrt()
        beta = (gates["beta"].expand(k.shape[:3]) + LEAST).sqrt()[..., None]
        given = (x.to(v.dtype) for x in (q / root, beta * k / root, beta * v))
        rows, both = root[..., None], root[..., None] * root[..., None, :]
        before = gram / both, memory / rows
        o, (gram, memory) = solve(self._regression, *given, gates["g"], scale=scale, state=before)
        return o, (both * gram, rows * memory)

    @property
    def _regression(self) -> Ridge:
        return Ridge(solver="cg", iterations=self.iterations, strength=1.0, adaptive=False)
