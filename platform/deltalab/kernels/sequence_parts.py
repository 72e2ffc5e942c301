"""Cuts a long sequence into parts that run at a time, once the states between the parts are known.

A part takes a state S to T S + L. T is the state that the part reaches from the identity if nothing is written, and L
the state that it reaches from zero. T and L are computed for all parts at once, so that one pass over the sequence
becomes two passes over a part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PROGRAMS = 132
"""Programs of a scan that run at a time. All parts together have no more programs."""

SHORTEST = 32
"""The fewest chunks of a part. The scan of a shorter part takes less time than finding its first state."""

MOST = 16
"""The most parts. The state goes from each part to the next by a product of its own, about 10 us."""


def count(programs: int, chunks: int) -> int:
    """Number of parts for sequences of `chunks` chunks, a power of two; whole sequences take `programs` programs."""
    parts = 1
    while (
        2 * parts <= MOST
        and 2 * parts * programs <= PROGRAMS
        and 2 * parts * SHORTEST <= chunks
        and chunks % (2 * parts) == 0
    ):
        parts *= 2
    return parts


def split(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Splits [B parts, ...] into one tensor [B, ...] for each part."""
    tensors: tuple[Tensor, ...] = x.unflatten(0, (-1, parts)).unbind(1)
    return tensors


def first_states(state: Tensor | None, maps: Sequence[Tensor], written: Sequence[Tensor]) -> list[Tensor]:
    """The first state [B, H, K, V] of each part: S of the first part, and T S + L of the part before for each other.

    Args:
        state: S of the first part, or None for zero.
        maps: T of each part, [B, H, K, K], or [B, H, 1, 1] if the state only decays.
        written: L of each part, [B, H, K, V].
    """
    states = [torch.zeros_like(written[0]) if state is None else state]
    with torch.autocast(written[0].device.type, enabled=False):
        for linear, added in zip(maps[:-1], written[:-1], strict=True):
            states.append(added + (linear @ states[-1] if linear.shape[-1] > 1 else linear * states[-1]))
    return states
