"""Rewrites a recurrence so that the parallel form needs neither signs nor reads before the write, and kernels no signs.

A sign moves into the vectors: with P_t the product of all signs up to t, S' = P S decays by exp(g) alone. A read of
S_{t-1} becomes a read after the write if all writes come one row later. `ops.reference.recurrent` computes signs and
early reads as they are declared.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.rule import Operands, State
from deltalab.structure import Transition


class Lowered(NamedTuple):
    """A recurrence without signs.

    Attributes:
        transition: The transition of the state.
        operands: The operands.
        bonus: The term that is added to the output before the scale, [B, T, H, V].
        turned: The sign of the state after all rows, [B, H] or [B, H, K].
        later: Whether the writes come one row later.
    """

    transition: Transition
    operands: Operands
    bonus: Tensor | None = None
    turned: Tensor | None = None
    later: bool = False

    def finish(self, o: Tensor, state: State, scale: float) -> tuple[Tensor, State]:
        """The output and the states of the declared recurrence, from those of the lowered one."""
        if self.later:
            o = o[:, :-1]
        if self.bonus is not None:
            o = o + scale * self.bonus.to(o)
        if self.turned is not None:
            first, *rest = state
            state = (first * self.turned[(...,) + (None,) * (first.dim() - self.turned.dim())], *rest)
        return o, state


def lowered(transition: Transition, operands: Operands, *, early: bool = False) -> Lowered:
    """Returns the same recurrence, rewritten without signs.

    Args:
        transition: The transition of the state.
        operands: The operands.
        early: Whether reads before the write stay. If not, they become reads of S_t.
    """
    bonus, turned, later = None, None, transition.output == "before" and not early
    if operands.bonus is not None:
        bonus = operands.bonus[..., None] * operands.u
        operands = replace(operands, bonus=None)
    if later:
        transition, operands = _one_row_later(transition, operands)
    if operands.sign is not None:
        transition, operands, turned = _unsigned(transition, operands, operands.sign)
    return Lowered(transition, operands, bonus, turned, later)


def for_kernels(transition: Transition, operands: Operands) -> Lowered:
    """Returns the same recurrence as the kernels take it.

    A free low rank has a decay for each channel. Reads before the write stay, except where a low rank reads the decayed
    state of a decay by channel: the kernels have one factor for all that is read at a token.
    """
    by_channels = transition.decay == "diagonal" or transition.low_rank == "free"
    late = transition.low_rank != "none" and transition.reads == "decayed_state"
    return by_channel(lowered(transition, operands, early=not (by_channels and late)))


def _one_row_later(transition: Transition, operands: Operands) -> tuple[Transition, Operands]:
    """Puts an empty write first. The last row reads nothing, and only lets the last write reach the state."""
    operands = operands.resolved()

    def shifted(tensor: Tensor | None, value: float = 0.0) -> Tensor | None:
        return None if tensor is None else F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (1, 0), value=value)

    k, u = F.pad(operands.k, (0, 0, 0, 0, 1, 0)), F.pad(operands.u, (0, 0, 0, 0, 1, 0))
    r = F.pad(operands.r, (0, 0, 0, 0, 0, 1))
    changes: dict[str, Any] = {name: shifted(getattr(operands, name)) for name in ("g", "e", "a", "b")}
    operands = replace(operands, r=r, k=k, u=u, **changes, sign=shifted(operands.sign, 1.0))
    return replace(transition, output="after"), operands


def _unsigned(transition: Transition, operands: Operands, sign: Tensor) -> tuple[Transition, Operands, Tensor]:
    """Moves the signs of a recurrence into its vectors, and returns the sign that multiplies its last state."""
    product = sign.detach().to(torch.promote_types(operands.u.dtype, torch.float32)).cumprod(dim=1)
    before = F.pad(product[:, :-1], (0, 0) * (product.dim() - 2) + (1, 0), value=1.0)
    reads = before if transition.output == "before" else product[:, transition.steps - 1 :: transition.steps]
    turned, late = product[:, -1], transition.reads == "decayed_state"
    if sign.dim() == 3:  # One sign for the whole state moves into the values.
        seen = product * (product if late else before)
        operands = replace(
            operands,
            r=reads[..., None] * operands.r,
            u=product[..., None] * operands.u,
            e=None if operands.e is None else seen * operands.e,
            a=None if operands.a is None else seen[..., None] * operands.a,
            d=None if operands.d is None else product * operands.d,
            sign=None,
        )
        return transition, operands, turned
    k = product * operands.k
    if (
        operands.e is not None and not late
    ):  # The erasing key has the sign of the state before, so that it is another vector.
        operands = replace(operands, e=None, a=-operands.e[..., None] * k, b=before * operands.k)
        transition = replace(transition, low_rank="free")
    elif operands.a is not None and operands.b is not None:
        operands = replace(operands, a=product * operands.a, b=(product if late else before) * operands.b)
    return transition, replace(operands, r=reads * operands.r, k=k, sign=None), turned


def by_channel(low: Lowered) -> Lowered:
    """The same recurrence with a decay for each channel where the low rank is free: the kernels have no other form."""
    transition, operands = low.transition, low.operands
    if transition.low_rank != "free" or transition.decay == "diagonal":
        return low
    g = operands.k.new_zeros(operands.k.shape[:3]) if operands.g is None else operands.g
    operands = replace(operands, g=g[..., None].expand(operands.k.shape))
    return low._replace(transition=replace(transition, decay="diagonal"), operands=operands)
