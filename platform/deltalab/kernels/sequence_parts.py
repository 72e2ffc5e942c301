"""Cuts a long sequence into parts that run at a time, once the states between the parts are known.

A part takes a state S to T S + L. T is where it takes the identity if nothing is written, L where it takes zero. Both
are computed for all parts at once, so that one pass over the sequence becomes two passes over a part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PROGRAMS = 132
"""Programs of a scan that run at a time. The programs of all parts together are no more."""

SHORTEST = 32
"""The fewest chunks of a part. The scan of a shorter part takes less time than finding its first state."""

MOST = 16
"""The most parts. The state goes from each part to the next by a product of its own, about 10 us."""


def count(programs: int, chunks: int) -> int:
    """Number of parts for sequences of `chunks` chunks: a power of two. programs: of a scan of whole sequences."""
    parts = 1
    while (
        2 * parts <= MOST
        and 2 * parts * programs <= PROGRAMS
        and 2 * parts * SHORTEST <= chunks
        and chunks % (2 * parts) == 0
    ):
        parts *= 2
    return parts


def each(x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """Splits [B parts, ...] into one [B, ...] for each part."""
    found: tuple[Tensor, ...] = x.unflatten(0, (-1, parts)).unbind(1)
    return found


def chained(first: Tensor | None, maps: Sequence[Tensor], added: Sequence[Tensor]) -> list[Tensor]:
    """The first state [B, H, K, V] of each part: S, and then T S + L of the part before.

    first: S, None for zero. maps: T [B, H, K, K], or [B, H, 1, 1] if the state only decays. added: L [B, H, K, V].
    """
    states = [torch.zeros_like(added[0]) if first is None else first]
    with torch.autocast(added[0].device.type, enabled=False):
        for part, more in zip(maps[:-1], added[:-1], strict=True):
            states.append(more + (part @ states[-1] if part.shape[-1] > 1 else part * states[-1]))
    return states
