"""Computes the Pareto front, the volume that it dominates, and the volume that each point adds. Smaller is better."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Points = Sequence[Sequence[float]] | npt.NDArray[np.float64]
"""Points by their coordinates, [n, d]."""


def front(points: Points) -> list[int]:
    """Returns the indices of the points on the front, which no other point dominates.

    A point dominates another if it is as good in every coordinate and better in one. A point with a NaN is never on the
    front.

    Examples:
        >>> front([(1.0, 9.0), (2.0, 2.0), (3.0, 2.0), (math.nan, 0.0)])
        [0, 1]
    """
    table = _table(points)
    left = np.flatnonzero(~np.isnan(table).any(axis=1))
    if not len(left):
        return []
    # In the order of the first coordinate, then the next, no point dominates an earlier one.
    left = left[np.lexsort(table[left].T[::-1])]
    kept, at = table[left], 0
    while at < len(kept):
        stay = (kept < kept[at]).any(axis=1) | (kept == kept[at]).all(axis=1)
        left, kept, at = left[stay], kept[stay], at + 1
    return sorted(left.tolist())


def hypervolume(points: Points, reference: Sequence[float]) -> float:
    """Returns the exact volume of the region that at least one point dominates and that is better than the reference.

    Points with a NaN, and points that are no better than the reference in some coordinate, add nothing. Slices along
    the last coordinate take O(n^2) for n points in three coordinates, and a factor n more for each further coordinate.

    Examples:
        >>> hypervolume([(0.0, 2.0), (1.0, 0.0)], (2.0, 3.0))
        4.0
    """
    return _volume(_inside(points, reference), np.asarray(reference, dtype=np.float64))


def contributions(points: Points, reference: Sequence[float]) -> list[float]:
    """Returns how much hypervolume would be lost without each point: 0 for a point that is not on the front.

    Examples:
        >>> contributions([(0.0, 2.0), (1.0, 0.0), (1.0, 2.5)], (2.0, 3.0))
        [1.0, 2.0, 0.0]
    """
    table, limit = _table(points), np.asarray(reference, dtype=np.float64)
    inside = np.asarray((table < limit).all(axis=1))
    lost = [0.0] * len(table)
    for i in front(points):
        if inside[i]:
            others = inside.copy()
            others[i] = False
            lost[i] = _added(table[i], table[others], limit)
    return lost


def greedy_choice(points: Points, reference: Sequence[float], most: int, first: Sequence[int] = ()) -> list[int]:
    """Chooses points that together dominate a large volume. Each adds the most hypervolume to the points before it.

    The chosen points have at least 1 - 1/e of the largest hypervolume that as many points can have.

    Args:
        points: The points.
        reference: The reference of the hypervolume.
        most: The most points to choose.
        first: The indices of points that are chosen first.

    Returns:
        The indices in the order of the choice; fewer than `most` if no other point would add any volume.

    Examples:
        >>> greedy_choice([(0.0, 2.0), (1.0, 0.0), (0.9, 1.9)], (2.0, 3.0), 2)
        [1, 0]
        >>> greedy_choice([(0.0, 2.0), (1.0, 0.0), (0.9, 1.9)], (2.0, 3.0), 2, first=[2])
        [2, 1]

    References:
        Nemhauser, Wolsey and Fisher 1978.
    """
    table, limit = _table(points), np.asarray(reference, dtype=np.float64)
    taken = [*first[:most]]
    left = [i for i in front(points) if (table[i] < limit).all() and i not in taken]
    adds = {i: _added(table[i], table[taken], limit) for i in left}
    while left and len(taken) < most:
        best = max(left, key=lambda i: (adds[i], -i))
        if adds[best] <= 0:
            break
        taken.append(best)
        left.remove(best)
        adds = {i: _added(table[i], table[taken], limit) for i in left}
    return taken


def ranked(points: Points, reference: Sequence[float], most: int) -> list[int]:
    """Returns the indices of all points, the best first: the front, then the front of the remaining points, and so on.

    Within a front, points that add more hypervolume come first. Points with a NaN come last.

    Args:
        points: The points.
        reference: The reference of the hypervolume.
        most: How many of the best points must be in order. Points beyond the front that completes this number keep
            their given order.

    Examples:
        >>> ranked([(0.0, 2.0), (1.0, 0.0), (1.0, 2.5), (math.nan, 0.0)], (2.0, 3.0), 4)
        [1, 0, 2, 3]
    """
    table = _table(points)
    left = [*range(len(table))]
    order: list[int] = []
    while len(order) < most and (first := [left[i] for i in front(table[left])]):
        adds = contributions(table[first], reference)
        order += [first[i] for i in sorted(range(len(first)), key=lambda i: (-adds[i], i))]
        left = sorted({*left} - {*first})
    return order + left


def beyond_worst(points: Points) -> tuple[float, ...]:
    """Returns a reference for the hypervolume: in each coordinate the worst value plus a tenth of the range.

    Examples:
        >>> beyond_worst([(0.0, 2.0), (1.0, 0.0), (math.nan, 9.0)])
        (1.1, 2.2)
    """
    table = _table(points)
    table = table[~np.isnan(table).any(axis=1)]
    if not len(table):
        return tuple(np.zeros(table.shape[1]))
    worst, range_ = table.max(axis=0), np.ptp(table, axis=0)
    return tuple(float(value) for value in worst + 0.1 * np.where(range_ > 0, range_, 1.0))


def _table(points: Points) -> npt.NDArray[np.float64]:
    """The points as an array [n, d]."""
    return np.asarray(points, dtype=np.float64).reshape(len(points), -1 if len(points) else 0)


def _inside(points: Points, reference: Sequence[float]) -> npt.NDArray[np.float64]:
    """The points that are better than the reference in every coordinate."""
    if not len(points):
        return np.empty((0, len(reference)))
    table = _table(points)
    return table[(table < np.asarray(reference)).all(axis=1)]


def _nondominated(table: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The points on the front, each once, sorted by their first coordinate."""
    table = np.unique(table, axis=0)
    no_worse = np.asarray((table[:, None] <= table[None]).all(axis=2))
    np.fill_diagonal(no_worse, False)
    return table[~no_worse.any(axis=0)]


def _volume(table: npt.NDArray[np.float64], limit: npt.NDArray[np.float64]) -> float:
    """The hypervolume of points that are no worse than the limit in any coordinate."""
    if not len(table):
        return 0.0
    if table.shape[1] == 1:
        return float(limit[0] - table.min())
    if table.shape[1] > 3:
        table = _nondominated(table)
        table = table[np.argsort(table[:, -1])]
        heights = np.diff(np.append(table[:, -1], limit[-1]))
        return math.fsum(
            height * _volume(table[: i + 1, :-1], limit[:-1]) for i, height in enumerate(heights) if height > 0
        )
    table = table[np.argsort(table[:, 0])]
    widths = np.diff(np.append(table[:, 0], limit[0]))
    if table.shape[1] == 2:
        return float((limit[1] - np.minimum.accumulate(table[:, 1])) @ widths)
    # Cut the volume at every third coordinate. Row k is the staircase of the points that reach below cut k.
    cuts = np.sort(table[:, 2])
    reach = np.where(table[:, 2] <= cuts[:, None], table[:, 1], limit[1])
    areas = (limit[1] - np.minimum.accumulate(reach, axis=1)) @ widths
    return float(areas @ np.diff(np.append(cuts, limit[2])))


def _added(point: npt.NDArray[np.float64], others: npt.NDArray[np.float64], limit: npt.NDArray[np.float64]) -> float:
    """The volume that a point adds to others: the point's box, less the part that the others dominate."""
    return float(np.prod(limit - point)) - _volume(np.maximum(others, point), limit)
