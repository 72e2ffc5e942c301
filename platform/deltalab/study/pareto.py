"""The Pareto front: the points that no other point dominates."""

import math
from collections.abc import Sequence


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """The indices of the points on the front, where smaller is better in every coordinate.

    A point dominates another if it is as good in every coordinate and better in one. A point with a NaN is never on it.

    >>> front([(1.0, 9.0), (2.0, 2.0), (3.0, 2.0), (math.nan, 0.0)])
    [0, 1]
    """
    whole = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    return [i for i in whole if not any(_dominates(points[j], points[i]) for j in whole)]


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))
