"""The structure of a state update, as data that the reference, the kernels and the checks read."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from deltalab.errors import InputError, unknown

TRANSITION_OPTIONS = {
    "decay": ("none", "scalar", "diagonal"),
    "low_rank": ("none", "tied", "free"),
    "reads": ("state", "decayed_state"),
    "output": ("after", "before"),
}
"""The values that each field of a `Transition` takes."""


@dataclass(frozen=True, kw_only=True)
class Transition:
    """The transition of one head's state S [K, V].

        S_t = D_t S_{t-1} + a_t (b_t^T X_{t-1}) + k_t u_t^T

    Attributes:
        name: The name by which YAML chooses the transition.
        decay: D_t. `none` is D_t = I, `scalar` is D_t = exp(g_t), `diagonal` is D_t = diag(exp(g_t)), with g_t <= 0.
        low_rank: a_t and b_t. `none` is a_t = 0. `tied` erases along the key that the step writes, with strength e_t:
            a_t = -e_t k_t and b_t = k_t. `free` takes a_t and b_t from the rule.
        reads: X_{t-1}, the state that the low rank reads. `state` is S_{t-1}, `decayed_state` is D_t S_{t-1}.
            For a scalar decay and a tied low rank, papers call the two SPLR and IPLR. Published code disagrees on
            which is which.
        steps: The updates per token. The output reads the state after the last of them.
        output: The state that o_t reads. `after` is S_t. `before` is S_{t-1}, as in RWKV-6, and takes one step per
            token.

    Raises:
        InputError: A field has a value that it does not take.
    """

    name: str
    decay: Literal["none", "scalar", "diagonal"] = "none"
    low_rank: Literal["none", "tied", "free"] = "none"
    reads: Literal["state", "decayed_state"] = "state"
    steps: int = 1
    output: Literal["after", "before"] = "after"

    def __post_init__(self) -> None:
        for name, allowed in TRANSITION_OPTIONS.items():
            if getattr(self, name) not in allowed:
                raise unknown(name, getattr(self, name), allowed, where=f"Transition(name={self.name!r})")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise InputError(f"Transition(name={self.name!r}): steps must be a whole number >= 1, not {self.steps!r}")
        if self.output == "before" and self.steps > 1:
            raise InputError(f"Transition(name={self.name!r}): output 'before' takes one step per token")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class ResidualState:
    """A second state R [K, V] that fits the error of the first state's prediction, as in RLA and RDN.

    The output reads S_{t-1} and R_t. R_t is written with the pseudo-residual of the error v_t - S_{t-1}^T k_t.

    Attributes:
        loss: The loss whose negative gradient is the pseudo-residual: the error itself for `l2`, the error clipped to
            [-clip, clip] for `huber`, and the tanh of the error for `log_cosh`.
        clip: The bound of `huber`.
    """

    loss: Literal["l2", "huber", "log_cosh"] = "huber"
    clip: float = 1.0

    def pseudo_residual(self, error: Tensor) -> Tensor:
        """Returns the negative gradient of the loss, elementwise."""
        if self.loss == "l2":
            return error
        return error.tanh() if self.loss == "log_cosh" else error.clamp(-self.clip, self.clip)


WELL_CONDITIONED = 0.01
"""The least `Ridge.strength`, relative to ||H||, at which the precision of one bf16 number suffices."""


@dataclass(frozen=True, kw_only=True)
class Ridge:
    """A read of the state by ridge regression, as in Gated KalmaNet.

        H_t = exp(g_t) H_{t-1} + k_t k_t^T,   U_t = exp(g_t) U_{t-1} + k_t v_t^T
        o_t = scale U_t^T x_t,   (H_t + lambda_t I) x_t = q_t

    Attributes:
        solver: The solver of the system. `chebyshev` and `cg` (conjugate gradient) take `iterations` steps. `exact`
            forms and factorizes each H_t.
        iterations: The steps of an iterative solver.
        strength: The number that gives lambda_t. If `adaptive`, the condition number is at most
            (strength + 1) / strength.
        adaptive: Whether lambda_t = strength ||H_t||_F. Otherwise lambda_t = strength.
        backward: The way to the gradients. `implicit` differentiates the equation. `autograd` differentiates the
            iterations and keeps every iterate.

    Raises:
        InputError: `iterations` is below 1, or `strength` is not positive.

    References:
        Gated KalmaNet, arXiv:2511.21016.
    """

    solver: Literal["chebyshev", "cg", "exact"] = "chebyshev"
    iterations: int = 30
    strength: float = 0.02
    adaptive: bool = True
    backward: Literal["implicit", "autograd"] = "implicit"

    def __post_init__(self) -> None:
        if self.iterations < 1 or not self.strength > 0:
            raise InputError(
                f"a ridge takes iterations >= 1 and strength > 0, not {self.iterations} and {self.strength:g}"
            )

    def in_one_half(self, dtype: torch.dtype) -> bool:
        """Returns whether the kernels store states as one 16-bit value (True), or as a sum of two (False).

        With bf16 inputs and a well-conditioned system, one value keeps the error below the 5e-3 that is allowed.

        Args:
            dtype: The dtype of q, k and v.
        """
        return dtype == torch.bfloat16 and self.adaptive and self.strength >= WELL_CONDITIONED


ADDITIVE = Transition(name="additive")
"""S_{t-1}: nothing is forgotten (linear attention)."""

DECAY = Transition(name="decay", decay="scalar")
"""alpha_t S_{t-1} (RetNet, Mamba2)."""

DIAGONAL = Transition(name="diagonal", decay="diagonal")
"""diag(alpha_t) S_{t-1} (GLA, HGRN2)."""

HOUSEHOLDER = Transition(name="householder", low_rank="tied")
"""(I - e k k^T) S_{t-1} (DeltaNet)."""

IPLR = Transition(name="iplr", decay="scalar", low_rank="tied", reads="decayed_state")
"""alpha_t (I - e k k^T) S_{t-1}: identity plus low rank (Gated DeltaNet, Comba-iplr)."""

SPLR = Transition(name="splr", decay="scalar", low_rank="tied", reads="state")
"""(alpha_t I - e k k^T) S_{t-1}: scalar plus low rank (Comba)."""

DPLR = Transition(name="dplr", decay="diagonal", low_rank="tied", reads="state")
"""(diag(alpha_t) - e k k^T) S_{t-1}: diagonal plus low rank, erased along the key."""
