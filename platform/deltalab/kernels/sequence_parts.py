"""Cuts a long sequence into parts, which run at the same time after the states between them have been computed.

A part takes a state S to T S + L. T is the state that the part reaches from the identity if nothing is written, and L
the state that it reaches from zero. T and L are computed for all parts at once, so that one pass over the sequence
becomes two passes over a part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PROGRAMS = 132
"""How many programs of a scan run at the same time. All parts together have at most as many programs."""

SHORTEST = 32
"""The fewest chunks of a part. The scan of a shorter part takes less time than finding its first state."""

MOST = 16
"""The most parts of a sequence. Each state between two parts costs one product of matrices, about 10 us."""


def count(programs: int, chunks: int) -> int:
    """Returns the number of parts, a power of two, for sequences of `chunks` chunks.

    `programs` is the number of programs that the sequences take if they are not cut.
    """
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
    """Returns the first state [B, H, K, V] of each part. For a part after the first, it is T S + L of the part before.

    Args:
        state: The first state S of the first part, or None for zero.
        maps: T of each part, [B, H, K, K], or [B, H, 1, 1] if the state only decays.
        written: L of each part, [B, H, K, V].
    """
    states = [torch.zeros_like(written[0]) if state is None else state]
    with torch.autocast(written[0].device.type, enabled=False):
        for linear, added in zip(maps[:-1], written[:-1], strict=True):
            states.append(added + (linear @ states[-1] if linear.shape[-1] > 1 else linear * states[-1]))
    return states
