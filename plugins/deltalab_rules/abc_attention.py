"""Attention with bounded-memory control: softmax over slots, which are weighted means of keys and of values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from deltalab.errors import InputError
from deltalab.gates import Gate, parameterization
from deltalab.passes import Passes, Run, read_values
from deltalab.rule import Operands, State, knob
from deltalab.structure import DIAGONAL


@parameterization
def slot_logit(slots: float = 16, bound: float = 32.0) -> Gate:
    """W x, one for each of a head's slots, clipped to [-bound, bound]: the logarithm of how much a slot takes in."""
    if slots < 1 or slots != int(slots) or bound <= 0:
        raise InputError(
            f"slot_logit takes a whole number of slots and a positive bound, not slots {slots:g} and bound {bound:g}"
        )
    return Gate(
        per="slot", slots=int(slots), low=-float(bound), high=float(bound), value=lambda z, p: z.clamp(-bound, bound)
    )


@dataclass(frozen=True, kw_only=True)
class ABC(Passes):
    """z_t = log(exp(z_{t-1}) + exp(s_t)),   z_0 = -inf                                  (by slot)
    K_t = diag(exp(z_{t-1} - z_t)) K_{t-1} + exp(s_t - z_t) k_t^T,   V_t the same of v_t
    o_t = V_t^T softmax(scale K_t q_t)

    Peng et al. 2021 (arXiv:2110.02488, Section 3.4, ABC_MLP), with slots normalized over time as in FLA's layer: row m
    of K_t and of V_t is the mean of all keys and values so far, weighed by exp(s_m). q, k and v get SiLU. z is carried
    from token to token, as the third part of the state.

    Costs two passes of gla with as many key channels as slots, and the first pass's gradient once more.
    """

    name: ClassVar[str] = "abc"
    paper: ClassVar[str] = "arXiv:2110.02488"

    s: Gate = knob(slot_logit(), slot_logit(slots=8))

    @property
    def features(self) -> Literal["unit", "silu", "raw"]:
        return "silu"

    def initial_state(self, k: Tensor, v: Tensor) -> State:
        dtype = torch.promote_types(v.dtype, torch.float32)
        heads, slots = (v.shape[0], v.shape[2]), self.s.slots
        memories = (v.new_zeros(*heads, slots, width, dtype=dtype) for width in (k.shape[-1], v.shape[-1]))
        return *memories, v.new_full((*heads, slots), -torch.inf, dtype=dtype)

    def passes(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Mapping[str, Tensor], *, scale: float, state: State, run: Run
    ) -> tuple[Tensor, State]:
        s = gates["s"].to(state[2].dtype)
        z = torch.logcumsumexp(torch.cat([state[2][:, None], s], dim=1), dim=1)
        g, write = z[:, :-1] - z[:, 1:], (s - z[:, 1:]).exp()
        logits, (keys,) = read_values(run, DIAGONAL, Operands(r=q, k=write, u=k, g=g), state=state[:1])
        weights = (scale * logits).softmax(-1)
        o, (values,) = run(DIAGONAL, Operands(r=weights, k=write, u=v, g=g), state=state[1:2])
        return o, (keys, values, z[:, -1])

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, state: State, s: Tensor) -> tuple[Tensor, State]:
        *memories, before = state
        z = torch.logaddexp(before, s)
        keep, write = (before - z).exp()[..., None], (s - z).exp()[..., None]
        keys, values = (keep * memory + write * x[..., None, :] for memory, x in zip(memories, (k, v), strict=True))
        weights = (scale * torch.einsum("bhmk,bhk->bhm", keys, q)).softmax(-1)
        return torch.einsum("bhm,bhmv->bhv", weights, values), (keys, values, z)
