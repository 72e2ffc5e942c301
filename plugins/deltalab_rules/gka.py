"""Gated KalmaNet: each token's output is a ridge regression on all the past, solved by Chebyshev iteration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.ridge import fused_regression, lacks_kernel, regression
from deltalab.rule import State, UpdateRule, knob
from deltalab.structure import Ridge


@dataclass(frozen=True, kw_only=True)
class GKA(UpdateRule):
    """H_t = alpha_t H_{t-1} + k_t k_t^T
    U_t = alpha_t U_{t-1} + k_t v_t^T
    o_t = scale U_t^T x_t,   x_t ~= (H_t + lambda_t I)^{-1} q_t,   alpha_t = exp(g_t)

    Peng et al. 2025 (arXiv:2511.21016, Section 4). The state is the pair (H, U), both decaying with eigenvalue
    alpha_t. lambda_t = ridge ||H_t||_F where adaptive, which bounds the condition number by (1 + ridge) / ridge; else
    lambda_t = ridge. solver: Chebyshev iteration, conjugate gradient, or exact. Gradients are those of the exact
    solution (implicit differentiation), with the solver's own error. A token costs 3 K^2 an iteration, but K^3 exact.
    """

    name: ClassVar[str] = "gka"
    paper: ClassVar[str] = "arXiv:2511.21016"
    published = {
        "source": "Section 4 and Algorithm 1 of arXiv:2511.21016",
        "lacks": "the convolution, norm and gate of the paper's own layer: those of a plain model stand here",
    }

    g: Gate = knob(forms.mamba2_decay(), forms.gla_decay(), forms.const(0))
    ridge: float = knob(0.02, 0.2, 0.001)
    adaptive: bool = knob(True, False)
    solver: str = knob("chebyshev", "cg", "exact")
    iterations: int = knob(30, 10, 1)

    def __post_init__(self) -> None:
        if self.solver == "exact" and self.iterations != 30:
            raise InputError(f"{self.name}.iterations has no effect with solver exact: leave it out")

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        batch, _, heads, key_dim = k.shape
        empty = [v.new_zeros(batch, heads, key_dim, width, dtype=dtype) for width in (key_dim, v.shape[-1])]
        return empty[0], empty[1]

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        gram, memory = state
        return regression(self._regression, q, k, v, gates["g"], scale=scale, state=(gram, memory))

    def fused(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State
    ) -> tuple[Tensor, State]:
        gram, memory = state
        return fused_regression(self._regression, q, k, v, gates["g"], scale=scale, state=(gram, memory))

    def lacks_kernel(self, k: Tensor, v: Tensor) -> str | None:
        return lacks_kernel(self._regression, k, v)

    @property
    def _regression(self) -> Ridge:
        return Ridge(
            solver=cast(Any, self.solver),
            iterations=self.iterations,
            strength=self.ridge,
            adaptive=self.adaptive,
        )
