"""Raven: gated slot attention in which each token is routed to a few slots, and leaves the others as they are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab import gates as forms
from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.passes import Passes, Run, read_values
from deltalab.rule import Operands, State, knob
from deltalab.structure import DIAGONAL


@parameterization
def router(slots: float = 16) -> Gate:
    """sigmoid(W x), one for each of a head's slots: how well the token suits the slot."""
    if slots < 1 or slots != int(slots):
        raise InputError(f"router.slots must be a whole number of at least 1, not {slots:g}")
    return Gate(per="slot", slots=int(slots), low=0.0, high=1.0, value=lambda z, p: z.sigmoid())


@dataclass(frozen=True, kw_only=True)
class Raven(Passes):
    """f_tm = g_t w_tm,   w_tm = p_tm / sum of the chosen p_t for the `top` slots with the largest p_t, and 0 for others
    K_t = diag(exp(f_t)) K_{t-1} + (1 - exp(f_t)) k_t^T,   V_t the same of v_t
    o_t = V_t^T softmax(scale K_t q_t)

    "Raven: high-recall sequence modeling with sparse memory routing", in the form of FLA's layer: a slot that is not
    chosen neither forgets nor takes in. p is `p`, the router's score; the choice itself has no gradient, and the Gumbel
    noise of their training is left out. q and k get SiLU and a root mean square of 1; their scale is 1. top is at
    least 2: the only slot's weight would be 1, and the router could not learn.

    Costs what gsa costs, and a sort of the slots.
    """

    name: ClassVar[str] = "raven"
    paper: ClassVar[str] = "Raven: high-recall sequence modeling with sparse memory routing"

    g: Gate = knob(forms.mamba2_decay())
    p: Gate = knob(router(), router(slots=8))
    top: int = knob(4, 2, 3)

    def __post_init__(self) -> None:
        if self.top > self.p.slots:
            raise InputError(f"{self.name}.top must be at most the router's {self.p.slots} slots, not {self.top}")

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "silu"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        heads, slots = (v.shape[0], v.shape[2]), self.p.slots
        return tuple(v.new_zeros(*heads, slots, width, dtype=dtype) for width in (k.shape[-1], v.shape[-1]))

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        weights = self._routed(gates["p"])
        g = gates["g"].clamp_min(-1e30)[..., None]  # -inf times a weight of 0 has no gradient.
        f = torch.where(weights > 0, g * weights, 0.0)
        write, q, k = -torch.expm1(f), _normalized(q), _normalized(k)
        logits, (keys,) = read_values(run, DIAGONAL, Operands(r=q, k=write, u=k, g=f), state=state[:1])
        attention = (scale * logits).softmax(-1)
        o, (values,) = run(DIAGONAL, Operands(r=attention, k=write, u=v, g=f), state=state[1:])
        return o, (keys, values)

    def _routed(self, p: Tensor) -> Tensor:
        """The scores of the `top` slots, with sum 1, and 0 for the others."""
        chosen = torch.zeros_like(p).scatter(-1, p.topk(self.top, dim=-1).indices, 1.0) * p
        return chosen / (chosen.sum(-1, keepdim=True) + 1e-9)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, g: Tensor, p: Tensor
    ) -> tuple[Tensor, State]:
        least = p.sort(dim=-1, descending=True).values[..., self.top - 1, None]
        weights = torch.where(p >= least, p, 0.0)
        f = g[..., None] * weights / (weights.sum(-1, keepdim=True) + 1e-9)
        alpha = torch.where(weights > 0, f, 0.0).exp()[..., None]
        q, k = _normalized(q), _normalized(k)
        keys, values = (alpha * memory + (1 - alpha) * x[..., None, :] for memory, x in zip(state, (k, v), strict=True))
        attention = (scale * torch.einsum("bhmk,bhk->bhm", keys, q)).softmax(-1)
        return torch.einsum("bhm,bhmv->bhv", attention, values), (keys, values)


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
