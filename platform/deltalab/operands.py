"""The operands of a recurrence: the vectors and scalars of every step, which `UpdateRule.operands` returns."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltalab.structure import ResidualState


@dataclass(frozen=True)
class Fit:
    """The operands of a second state R, which has the transition and the keys of the first state (RLA, RDN).

        R_t = D_t R_{t-1} - e_t k_t (k_t^T X) + strength_t k_t residual(v_t - S_{t-1}^T k_t)^T
        o_t = scale * (S_{t-1}^T r'_t + R_t^T r_t)

    Here r'_t is `Operands.r`, the read vector of the first state.

    Attributes:
        residual: The loss that R_t learns from.
        r: The read vector of R, [B, T, H, K].
        v: The value that S should have predicted, [B, T, H, V].
        strength: The write strength of R, [B, T, H].
        read: The read strength of R, [B, T, H]; None for 1.
        g: The log-decay of R; None for the log-decay of S.
        e: The erase strength of R; None for the erase strength of S.
    """

    residual: ResidualState
    r: Tensor
    v: Tensor
    strength: Tensor
    read: Tensor | None = None
    g: Tensor | None = None
    e: Tensor | None = None

    def operands(self, first: "Operands") -> "Operands":
        """Returns the operands of R, in which the u of the first state stands as a placeholder.

        The true u of R comes from the prediction error of the first state, which is known only after the first state's
        scan.

        Args:
            first: The operands of the first state.
        """
        g = first.g if self.g is None else self.g
        return dataclasses.replace(first, r=self.r, g=g, e=self.e, beta=self.strength, read=self.read, d=None, fit=None)


@dataclass(frozen=True)
class Operands:
    """The vectors and scalars of every step of the recurrence.

    K and V are the widths of the state: `UpdateRule.key_width` and `value_width`. With n steps per token
    (`Transition.steps`), all operands but r, read and bonus have n T rows instead of T: the steps of a token follow
    each other.

    A step writes beta_t u_t and reads with read_t r_t - d_t k_t. The scalars beta, read and d are kept apart from the
    vectors because a kernel applies them for free.

    Attributes:
        r: The read vector, [B, T, H, K].
        k: The write key, [B, T, H, K].
        u: The value to write, [B, T, H, V].
        g: The log-decay, at most 0, if the transition decays: [B, T, H] if it is scalar, [B, T, H, K] if diagonal.
        e: The erase strength, [B, T, H], if the low rank is tied to k.
        a: The left vector of a free low rank, [B, T, H, K]: a_t (b_t^T X) is added.
        b: The right vector of a free low rank, [B, T, H, K].
        beta: The write strength, [B, T, H]; None for 1.
        read: The read strength, [B, T, H]; None for 1.
        d: The part of the key that is taken off the read vector, [B, T, H]; None for 0. Needs one step per token.
        fit: The operands of a second state. With a fit, the first state is read before it is written.
        sign: 1 or -1 in the shape of g, for D_t = sign_t exp(g_t); None for 1. Does not go with a fit.
        bonus: The strength at which the output adds u_t, [B, T, H], if the output reads S_{t-1}.
        carry: The carry for the tokens that follow, in the form of `UpdateRule.carried`.
        exact_gradients: Whether the rule sums gradients over tokens so that they cancel, as for a rotation, or for a
            gate that is constant in time. Kernels in 16 bits then give the gradients of r, k, a and b in fp32. Pairs of
            tokens cancel exactly in the gradient of a g by channel. Has no effect with a fit.
        output: Makes o, of v's own width [B, T, H, V'], from the scaled reads [B, T, H, V]; a normalizer, for example.
    """

    r: Tensor
    k: Tensor
    u: Tensor
    g: Tensor | None = None
    e: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    beta: Tensor | None = None
    read: Tensor | None = None
    d: Tensor | None = None
    fit: Fit | None = None
    sign: Tensor | None = None
    bonus: Tensor | None = None
    carry: tuple[Tensor, ...] = ()
    exact_gradients: bool = False
    output: Callable[[Tensor], Tensor] | None = None

    def changed(self, **changes: Any) -> "Operands":
        """Returns a copy with some fields changed, as `dataclasses.replace` does, but ten times as fast."""
        if torch.compiler.is_compiling():
            return dataclasses.replace(self, **changes)
        # The __init__ of `Operands` checks nothing. So the copy can be made without calling it.
        new = object.__new__(type(self))
        vars(new).update(vars(self), **changes)
        return new

    def resolved(self) -> "Operands":
        """Returns the same operands with beta, read and d multiplied into the vectors."""
        u = self.u if self.beta is None else self.beta[..., None] * self.u
        r = self.r if self.read is None else self.read[..., None] * self.r
        r = r if self.d is None else r - self.d[..., None] * self.k
        fit = self.fit
        if fit is not None and fit.read is not None:
            fit = dataclasses.replace(fit, r=fit.read[..., None] * fit.r, read=None)
        return dataclasses.replace(self, r=r, u=u, beta=None, read=None, d=None, fit=fit)


def fields_of(x: Operands | Fit) -> dict[str, Any]:
    """Returns the fields by their names. PyTorch 2.11 does not compile `vars` of them."""
    if torch.compiler.is_compiling():
        return {field.name: getattr(x, field.name) for field in dataclasses.fields(x)}
    return vars(x)
