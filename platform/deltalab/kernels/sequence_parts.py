"""One sequence by many programs: cut in parts, each a sequence of its own once the states between them are known.

A part takes a state to T S + L, T what it makes of the identity where nothing is written and L its last state from
zero. Both are found for all parts at once, so that a pass over the sequence becomes two over a part.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

PROGRAMS = 132
"""Programs of a scan that run at a time: parts are no more than that leaves room for."""

SHORTEST = 32
"""Chunks that a part has at least; a shorter one is over before its states are known."""

MOST = 16
"""Parts; states go from one to the next by a product of their own, about 10 us."""


def count(programs: int, chunks: int) -> int:
    """Of parts, a power of two: of a sequence that is chunks long, where `programs` go through all sequences."""
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
    """[B parts, ..] as one [B, ..] for each part."""
    found: tuple[Tensor, ...] = x.unflatten(0, (-1, parts)).unbind(1)
    return found


def chained(first: Tensor | None, maps: Sequence[Tensor], added: Sequence[Tensor]) -> list[Tensor]:
    """The state [B, H, K, V] that each part starts with, S and then T S + L of the part before.

    first: zero where None. maps: T, [B, H, K, K], or [B, H, 1, 1] of a state that only decays. added: L.
    """
    states = [torch.zeros_like(added[0]) if first is None else first]
    with torch.autocast(added[0].device.type, enabled=False):
        for part, more in zip(maps[:-1], added[:-1], strict=True):
            states.append(more + (part @ states[-1] if part.shape[-1] > 1 else part * states[-1]))
    return states
