"""Decides which candidates of a search train for longer, and estimates how many good ones were dropped too early.

Candidates that train at a rung are ranked there, and the best go on to the next rung. A quarter of the places go to
candidates drawn by lot from those that did not earn a place. The share of lot candidates that are among the best at the
next rung estimates, without bias, the share of dropped candidates that would have been among them.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deltalab.statistics.intervals import LEVEL, share_learned
from deltalab.statistics.pareto import beyond_worst, ranked

BY_LOT = 0.25
"""The share of the places at the next rung that goes to candidates drawn by lot."""


@dataclass(frozen=True)
class Halving:
    """What happened between two rungs.

    Attributes:
        settings: The settings of the rung.
        next: The settings of the next rung.
        trained: Candidates with a result at the rung.
        by_rank: Candidates that went on by rank.
        by_lot: Candidates that went on by lot.
        best: How many candidates of the next rung count as its best: those that go on from there by rank, or become
            finalists.
        late: How many candidates that went on by lot are among the best of the next rung; None until all trials of the
            next rung have ended.
        low: The lower end of the exact 95% interval of the share of dropped candidates that `best` would include.
        high: The upper end of that interval.
    """

    settings: dict[str, int]
    next: dict[str, int]
    trained: int
    by_rank: int
    by_lot: int
    best: int
    late: int | None = None
    low: float = math.nan
    high: float = math.nan

    @property
    def dropped(self) -> int:
        """Candidates that did not go on."""
        return self.trained - self.by_rank - self.by_lot

    def __str__(self) -> str:
        """The halving in a sentence or two.

        Examples:
            >>> print(Halving({"train.steps": 20}, {"train.steps": 60}, 64, 17, 5, 6, 1, 0.005, 0.716))
            train.steps 20: dropped 42 of 64. Of 5 others that went on by lot, 1 came among the best 6 at \
train.steps 60: a dropped one would have with a probability of 0.005 to 0.72 (95%)
        """
        dropped = f"{_listed(self.settings)}: dropped {self.dropped} of {self.trained}."
        if self.late is None:
            return f"{dropped} {_listed(self.next)} has not ended"
        return (
            f"{dropped} Of {self.by_lot} others that went on by lot, {self.late} came among the best {self.best} at "
            f"{_listed(self.next)}: a dropped one would have with a probability of {self.low:.2g} to {self.high:.2g} "
            f"({LEVEL:.0%})"
        )


def _listed(settings: Mapping[str, int]) -> str:
    """The settings of a rung in one line."""
    return ", ".join(f"{path} {value}" for path, value in settings.items())


def by_lot(places: int) -> int:
    """How many of the places at the next rung are drawn by lot.

    Examples:
        >>> by_lot(22), by_lot(8), by_lot(1)
        (6, 2, 0)
    """
    return math.ceil(BY_LOT * places) if places > 1 else 0


def going_on(name: str, points: Mapping[int, Sequence[float]], places: int) -> tuple[list[int], list[int]]:
    """The numbers of the candidates that go on by rank, and of those that go on by lot.

    Args:
        name: The name that seeds the lot.
        points: The point of each candidate by its number, where smaller is better. A candidate without a result has
            NaN, and does not go on.
        places: How many candidates go on.
    """
    order = _order(points, places)
    places = min(places, len(order))
    earned = places - (by_lot(places) if places < len(order) else 0)
    rest = sorted(order[earned:], key=lambda number: hashlib.sha256(f"{name}/{number}".encode()).digest())
    return order[:earned], sorted(rest[: places - earned])


def halving(
    settings: Sequence[dict[str, int]],
    points: Mapping[int, Sequence[float]],
    went: tuple[Sequence[int], Sequence[int]],
    after: Mapping[int, Sequence[float]] | None,
    best: int,
) -> Halving:
    """Counts what happened between two rungs.

    Args:
        settings: The settings of both rungs.
        points: The candidates at the rung, as `going_on` takes them.
        went: The numbers of the candidates that went on by rank and by lot.
        after: The candidates at the next rung; None until all have ended.
        best: How many candidates of the next rung count as its best.
    """
    by_rank, lots = went
    trained = len(_known(points))
    if after is None or not lots:
        return Halving(settings[0], settings[1], trained, len(by_rank), len(lots), best)
    top = set(_order(after, best)[:best])
    share = share_learned([number in top for number in lots], 0.5)
    low_high = (share.low, share.high)
    return Halving(settings[0], settings[1], trained, len(by_rank), len(lots), best, share.learned, *low_high)


def _order(points: Mapping[int, Sequence[float]], most: int) -> list[int]:
    """The numbers of the candidates with a result, the `most` best first."""
    known = _known(points)
    numbers, table = [*known], [*known.values()]
    return [numbers[i] for i in ranked(table, beyond_worst(table), most)]


def _known(points: Mapping[int, Sequence[float]]) -> dict[int, Sequence[float]]:
    """The points of the candidates with a result."""
    return {number: point for number, point in points.items() if not any(map(math.isnan, point))}
