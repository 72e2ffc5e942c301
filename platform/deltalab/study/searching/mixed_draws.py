"""Draws candidates by TPE, near those that no other beats, and at random while that gains nothing: decision 217."""

import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import numpy as np

from deltalab.statistics.pareto import front
from deltalab.study.searching.sampler import START, OptunaStudy
from deltalab.study.specs.sections.budget import Sampler, Searching
from deltalab.study.specs.sections.search_space import Search

BY_TPE = 0.4
"""The share of the candidates that TPE draws."""
STEP = 0.15
"""The standard deviation of a step on a range, as a share of the range."""
SECOND = 0.4
"""How often a second setting changes."""
STALLED = 24
"""The number of results in a row without a gain after which the search has stalled."""
GAIN = 0.01
"""The share of an objective's range by which a result must be better than each candidate of the front to be a gain."""
AT_RANDOM = 0.5
"""The share of the candidates that is drawn at random while the search has stalled."""
DARTS = 1024
"""The number of random points in the box around all results. A candidate of the front adds as much as the share of
points that it alone dominates. Exact volumes would take seconds in five coordinates."""
TRIES = 20
"""How often a candidate that was drawn before is drawn anew."""


class MixedDraws:
    """Draws by TPE, or changes one or two knobs of a candidate on the front, in turns by lot.

    While the search has stalled, half of the candidates are drawn at random instead. It is used as `OptunaStudy` is.
    What `draw` returns follows from the calls of `add` and `tell`, and from its arguments, alone. So a search that was
    killed goes on with the same candidates.
    """

    def __init__(self, name: str, space: Searching, maximize: Sequence[bool]) -> None:
        """Begins without a candidate.

        Args:
            name: The name of the search, which seeds the draws.
            space: The space of the search.
            maximize: Whether more is better, for each objective.
        """
        self._name, self._space = name, space
        self._signs = [-1.0 if more else 1.0 for more in maximize]
        self._optuna = OptunaStudy(name, space, maximize)
        self._seen: set[str] = set()
        self._running: deque[dict[str, Any]] = deque()
        self._front: list[tuple[list[float], dict[str, Any]]] = []
        self._bounds: list[tuple[float, float]] = []
        self._weights: list[float] = []
        self._told = self._gained = 0

    def draw(self, number: int, sampler: Sampler) -> dict[str, Any]:
        """Draws a candidate of the space.

        Args:
            number: The candidate's number, which seeds the draw.
            sampler: "random" for a candidate of the control, which depends on no result.
        """
        draw = Random(f"{self._name}/{number}")
        at_random, by_tpe = draw.random() < AT_RANDOM, draw.random() < BY_TPE
        stalled = self._told - self._gained >= STALLED
        if sampler == "random" or self._told < START or not self._front or (stalled and at_random):
            return self._optuna.draw(number, "random")
        if by_tpe:
            return self._optuna.draw(number, "tpe")
        self._weights = self._weights or self._added_by_each()
        for _ in range(TRIES):
            ((_, parent),) = draw.choices(self._front, self._weights)
            candidate = self._changed(parent, draw)
            if _text(candidate) not in self._seen:
                break
        return candidate

    def add(self, candidate: Mapping[str, Any], *, feasible: bool = True) -> None:
        """Adds a candidate of the space, from which the draws keep away.

        Args:
            candidate: The candidate.
            feasible: Whether the candidate makes a model. If not, no result is told.
        """
        self._seen.add(_text(candidate))
        self._optuna.add(candidate, feasible=feasible)
        if feasible:
            self._running.append(dict(candidate))

    def tell(self, values: Sequence[float] | None) -> None:
        """Tells the result of the oldest feasible candidate without a result.

        Args:
            values: The value of each objective; None if the candidate has no result that could be compared.
        """
        self._optuna.tell(values)
        candidate = self._running.popleft()
        self._told += 1
        if values is None:
            return
        point = [sign * value for sign, value in zip(self._signs, values, strict=True)]
        bounds = self._bounds or [(value, value) for value in point]
        self._bounds = [(min(low, x), max(high, x)) for (low, high), x in zip(bounds, point, strict=True)]
        if beyond(point, [other for other, _ in self._front], self._bounds) > GAIN:
            self._gained = self._told
        known = [*self._front, (point, candidate)]
        self._front = [known[i] for i in front([each for each, _ in known])]
        self._weights = []

    def _added_by_each(self) -> list[float]:
        """The root of the volume that each candidate of the front adds. None has nothing."""
        low, high = np.transpose(self._bounds)
        points = (np.array([point for point, _ in self._front]) - low) / np.where(high > low, high - low, 1)
        darts = 1.1 * np.random.default_rng(0).random((DARTS, len(low)))
        hit = (points[:, None] <= darts).all(axis=2)
        alone = (hit & (hit.sum(axis=0) == 1)).sum(axis=1)
        return [float(weight) for weight in np.sqrt(alone + 0.5)]

    def _changed(self, parent: Mapping[str, Any], draw: Random) -> dict[str, Any]:
        """A candidate that differs from another in one or two knobs, and in those that exist because of them."""
        before = self._space.drawn(parent)
        assert before is not None, f"not in the space: {parent}"
        changed = draw.sample([*before], min(1 + (draw.random() < SECOND), len(before)))

        def ask(name: str, knob: Search) -> Any:
            if name in before and name not in changed and knob.holds(before[name]):
                return before[name]
            return another_value(knob, before.get(name), draw)

        return self._space.draw(ask)


def beyond(point: Sequence[float], others: Sequence[Sequence[float]], bounds: Sequence[tuple[float, float]]) -> float:
    """By how much a point goes beyond each other point in some objective, as a share of the objective's range.

    Args:
        point: The point, of which less is better in each coordinate.
        others: The points of the front.
        bounds: The lowest and the highest value of each objective.
    """
    ranges = [high - low or math.inf for low, high in bounds]
    gaps = (
        max((theirs - own) / size for own, theirs, size in zip(point, other, ranges, strict=True)) for other in others
    )
    return min(gaps, default=math.inf)


def another_value(knob: Search, before: Any, draw: Random) -> Any:
    """Another value of a knob: any choice, or a place of a range near that of the value before if there is one."""
    if knob.choice is not None:
        return draw.choice([value for value in knob.choice if json.dumps(value) != json.dumps(before)])
    low, high = knob.extremes
    if knob.log_uniform is not None:
        low, high = math.log(low), math.log(high)
        before = None if before is None else math.log(before)
    place = draw.uniform(low, high) if before is None else draw.gauss(before, STEP * (high - low))
    if knob.integers is not None:
        step = round(place) if before is None or round(place) != before else before + draw.choice((-1, 1))
        return min(max(step, low), high)
    place = min(max(place, low), high)
    return min(max(math.exp(place), knob.extremes[0]), knob.extremes[1]) if knob.log_uniform is not None else place


def _text(candidate: Mapping[str, Any]) -> str:
    """A candidate as text, which is equal for equal candidates."""
    return json.dumps(candidate, sort_keys=True)
