"""Rewrites a recurrence so that the parallel form and the kernels need neither signs nor reads before the write.

A sign moves into the vectors: with P_t the product of all signs up to t, S' = P S decays by exp(g) alone. A read of
S_{t-1} is a read after the write where all writes come one row later. `ops.reference.recurrent` does neither.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import Operands, State
from deltalab.structure import Transition


class Lowered(NamedTuple):
    """A recurrence without signs that reads S_t.

    bonus: what the output gets besides, before the scale, [B, T, H, V]. turned: the sign of the state after all rows,
        [B, H] or [B, H, K]. later: whether the writes come one row later.
    """

    transition: Transition
    x: Operands
    bonus: Tensor | None = None
    turned: Tensor | None = None
    later: bool = False

    def finish(self, o: Tensor, state: State, scale: float) -> tuple[Tensor, State]:
        """The output and the states of the recurrence as declared, from those of this one."""
        if self.later:
            o = o[:, :-1]
        if self.bonus is not None:
            o = o + scale * self.bonus.to(o)
        if self.turned is not None:
            first, *rest = state
            state = (first * self.turned[(...,) + (None,) * (first.dim() - self.turned.dim())], *rest)
        return o, state


def lowers(transition: Transition, x: Operands) -> bool:
    return x.sign is not None or transition.output == "before"


def lowered(transition: Transition, x: Operands) -> Lowered:
    """The same recurrence without signs, which reads S_t."""
    bonus, turned, later = None, None, transition.output == "before"
    if later:
        bonus = None if x.bonus is None else x.bonus[..., None] * x.u
        transition, x = _one_row_later(transition, x)
    if x.sign is not None:
        transition, x, turned = _unsigned(transition, x, x.sign)
    return Lowered(transition, x, bonus, turned, later)


def _one_row_later(transition: Transition, x: Operands) -> tuple[Transition, Operands]:
    """An empty write comes first, and the last row reads nothing: it only lets the last write reach the state."""
    x = x.resolved()

    def first(one: Tensor | None, value: float = 0.0) -> Tensor | None:
        return None if one is None else F.pad(one, (0, 0) * (one.dim() - 2) + (1, 0), value=value)

    k, u = F.pad(x.k, (0, 0, 0, 0, 1, 0)), F.pad(x.u, (0, 0, 0, 0, 1, 0))
    r = F.pad(x.r, (0, 0, 0, 0, 0, 1))
    after = replace(x, r=r, k=k, u=u, g=first(x.g), e=first(x.e), a=first(x.a), b=first(x.b), sign=first(x.sign, 1.0))
    return replace(transition, output="after"), replace(after, bonus=None)


def _unsigned(transition: Transition, x: Operands, sign: Tensor) -> tuple[Transition, Operands, Tensor]:
    product = sign.detach().to(torch.promote_types(x.u.dtype, torch.float32)).cumprod(dim=1)
    before = F.pad(product[:, :-1], (0, 0) * (product.dim() - 2) + (1, 0), value=1.0)
    reads = product[:, transition.steps - 1 :: transition.steps]
    turned, late = product[:, -1], transition.reads == "decayed_state"
    if sign.dim() == 3:  # One sign for the whole state moves into the values.
        seen = product * (product if late else before)
        x = replace(
            x,
            r=reads[..., None] * x.r,
            u=product[..., None] * x.u,
            e=None if x.e is None else seen * x.e,
            a=None if x.a is None else seen[..., None] * x.a,
            d=None if x.d is None else product * x.d,
            sign=None,
        )
        return transition, x, turned
    k = product * x.k
    if x.e is not None and not late:  # The erasing key has the sign of the state before, so that it is another vector.
        x = replace(x, e=None, a=-x.e[..., None] * k, b=before * x.k)
        transition = replace(transition, low_rank="free")
    elif x.a is not None and x.b is not None:
        x = replace(x, a=product * x.a, b=(product if late else before) * x.b)
    return transition, replace(x, r=reads * x.r, k=k, sign=None), turned


def by_channel(low: Lowered) -> Lowered:
    """The same recurrence with a decay for each channel where the low rank is free: the kernels have no other form."""
    transition, x = low.transition, low.x
    if transition.low_rank != "free" or transition.decay == "diagonal":
        return low
    g = x.k.new_zeros(x.k.shape[:3]) if x.g is None else x.g
    x = replace(x, g=g[..., None].expand(x.k.shape))
    return low._replace(transition=replace(transition, decay="diagonal"), x=x)
