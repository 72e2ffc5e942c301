"""Shares the places of a search between the sampler and the proposer, by what each has found."""

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

from deltalab.statistics.pareto import front
from deltalab.study.searching.mixed_draws import GAIN, beyond

Rival = Literal["sampler", "proposed"]


class Rivals:
    """Draws whose turn it is: each rival as often as its chance of the better rate of gains (Thompson 1933).

    A gain is a result that goes beyond each one of the front, whatever drew it, by 1% of an objective's range. Turns
    follow from the results told, in order, so that a search that was killed goes on with the same turns.

    Attributes:
        front: The candidates that no other beats, as their points and what was told with them.
    """

    def __init__(self, name: str) -> None:
        """Begins without a result.

        Args:
            name: The name of the search, which seeds the turns.
        """
        self._name = name
        self._gains: dict[Rival, int] = {"sampler": 0, "proposed": 0}
        self._losses: dict[Rival, int] = {"sampler": 0, "proposed": 0}
        self.front: list[tuple[Sequence[float], Any]] = []
        self._bounds: list[tuple[float, float]] = []

    def turn(self, number: int) -> Rival:
        """Returns whose turn a place is.

        Args:
            number: The place, which seeds the draw.

        Examples:
            >>> rivals = Rivals("search")
            >>> {rivals.turn(number) for number in range(20)} == {"sampler", "proposed"}
            True
        """
        draw = Random(f"{self._name}/turn {number}")
        rates = {
            rival: draw.betavariate(1 + self._gains[rival], 1 + self._losses[rival]) for rival in sorted(self._gains)
        }
        return max(rates, key=lambda rival: rates[rival])

    def learn(self, rival: str, point: Sequence[float] | None, candidate: Any) -> None:
        """Takes a result.

        Args:
            rival: What drew the candidate; others than the rivals only add to the front.
            point: The result, of which less is better in each coordinate; None if the candidate has none.
            candidate: What `front` keeps beside the point.
        """
        gained = False
        if point is not None:
            bounds = self._bounds or [(value, value) for value in point]
            self._bounds = [(min(low, x), max(high, x)) for (low, high), x in zip(bounds, point, strict=True)]
            gained = beyond(point, [other for other, _ in self.front], self._bounds) > GAIN
            known = [*self.front, (point, candidate)]
            self.front = [known[i] for i in front([each for each, _ in known])]
        if rival in self._gains:
            counts = self._gains if gained else self._losses
            counts[rival] += 1
