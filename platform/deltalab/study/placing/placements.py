"""Searches placements of attention: scores all of them, or the neighbours of the best by a beam search."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from random import Random
from typing import TypeAlias

Placement: TypeAlias = tuple[int, ...]
"""The layers with attention, from 0, in order."""

MOST_SCORED = 500
"""The most placements that are scored. If there are no more, all are."""

DRAWN = MOST_SCORED // 4
"""The placements that a beam search draws before it begins, so that no part of the space stays unseen."""

BEST = 3
"""The best placements that train from scratch, unless the user says otherwise."""

SPREAD = 3
"""The others that train, unless the user says otherwise."""

BEAM = 16
"""The best placements whose neighbours a beam search scores next."""


def most_scored(layers: int, count: int) -> int:
    """Returns how many placements are scored at most.

    Args:
        layers: The layers of the model.
        count: The layers with attention.

    Examples:
        >>> most_scored(6, 2), most_scored(40, 4)
        (15, 500)
    """
    return min(MOST_SCORED, math.comb(layers, count))


def scored_placements(
    layers: int, count: int, start: Placement, score: Callable[[Placement], float]
) -> dict[Placement, float]:
    """Scores all placements if they are few, else those of a beam search.

    The beam search scores the start, `DRAWN` others, and then, again and again, all neighbours of the `BEAM` best,
    until none is new or `MOST_SCORED` are scored.

    Args:
        layers: The layers of the model.
        count: The layers with attention.
        start: The placement of the base.
        score: Gives the loss of a placement, of which less is better; NaN counts as the worst.

    Returns:
        The placements in the order in which they were scored.

    Examples:
        >>> found = scored_placements(4, 2, (1, 3), lambda placement: sum(placement))
        >>> len(found), min(found, key=found.__getitem__)
        (6, (0, 1))
        >>> found = scored_placements(40, 4, (9, 19, 29, 39), lambda placement: sum(placement))
        >>> len(found), min(found, key=found.__getitem__)
        (500, (0, 1, 2, 7))
    """
    if math.comb(layers, count) <= MOST_SCORED:
        return {placement: score(placement) for placement in combinations(range(layers), count)}
    found: dict[Placement, float] = {}

    def take(placements: Iterable[Placement], most: int = MOST_SCORED) -> None:
        for placement in placements:
            if len(found) < most and placement not in found:
                found[placement] = score(placement)

    take([start])
    random = Random(f"placements of {count} among {layers}")
    while len(found) < DRAWN:
        take([tuple(sorted(random.sample(range(layers), count)))], DRAWN)
    before = 0
    while before < len(found) < MOST_SCORED:
        before = len(found)
        take(near for best in ranked(found)[:BEAM] for near in neighbours(best, layers))
    return found


def neighbours(placement: Placement, layers: int) -> Iterator[Placement]:
    """Yields the placements that differ in the place of one attention layer.

    Examples:
        >>> list(neighbours((0, 1), 3))
        [(1, 2), (0, 2)]
    """
    for layer in placement:
        for other in sorted({*range(layers)} - {*placement}):
            yield tuple(sorted({*placement, other} - {layer}))


def ranked(losses: Mapping[Placement, float]) -> list[Placement]:
    """Returns placements from the best, with the least loss, to the worst. NaN comes last."""
    return sorted(losses, key=lambda placement: (math.isnan(losses[placement]), losses[placement], placement))


def confirmed(order: Sequence[Placement], base: Placement, best: int, spread: int) -> list[Placement]:
    """Chooses the placements to train: the best, and others at even distances in rank down to the worst.

    Args:
        order: The placements from best to worst.
        base: The placement of the base, which trains anyway.
        best: How many of the best to train.
        spread: How many of the others, the worst among them: they tell whether ranks mean anything.

    Examples:
        >>> confirmed([(n,) for n in range(10)], (1,), best=2, spread=3)
        [(0,), (2,), (5,), (7,), (9,)]
    """
    others = [placement for placement in order if placement != base]
    left = len(others) - best
    if left <= 0:
        return others
    spaced = (best - 1 + math.ceil(left * (place + 1) / spread) for place in range(spread))
    return [others[at] for at in dict.fromkeys((*range(best), *spaced))]
