"""The candidates of tuning: spread over the ranges, the same for all arms, whatever the study and its results.

And what candidates, of tuning and of a search, are called.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from deltalab.errors import InputError
from deltalab.store.models import Stage
from deltalab.study.specs.search_space import Search, combinations, count

MOST_DRAWN = 20
"""Candidates drawn for each that is wanted, at the most: some make no model, and some are drawn twice."""
RANDOM_FROM = 1_000_000
"""The number of the first candidate of a search's control; the sampler's begin at 0."""
WARM_FROM = 2_000_000
"""The number of the first candidate that a search's study names."""


def called(arm: str, stage: Stage, number: int, trials: int | None) -> str:
    """What a trial is called. A candidate is none of its arm, and counts from 0, as its number does.

    trials: of the study's search; None where it has none.

    >>> [called("base", "tune", number, 64) for number in (7, 1_000_002, 2_000_000)]
    ['candidate 7', 'random candidate 2', 'warm candidate 0']
    >>> called("found_1", "confirm", 0, 64), called("late", "confirm", 3, None)
    ('found_1, training 0', 'late, candidate 3')
    """
    if trials is None:
        return f"{arm}, candidate {number}"
    if stage == "confirm":
        return f"{arm}, training {number}"
    if number >= RANDOM_FROM:
        return f"{'random' if number < WARM_FROM else 'warm'} candidate {number % RANDOM_FROM}"
    own = number - MOST_DRAWN * trials
    return f"candidate {number}" if own < 0 else f"{arm}, training {own}"


def recorded_as(spec: Mapping[str, Any], arm: str, stage: Stage, number: int) -> str:
    """What a recorded trial is called: `called` in a search, else its arm, stage and number. spec: of its study."""
    search = spec.get("search")
    return called(arm, stage, number, search["trials"]) if search else f"{arm}, {stage} {number}"


def spread(searched: Mapping[str, Search], trials: int, own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Candidates that depend on the ranges, their number and the base's own values alone.

    A single range is a grid of both ends, the base's own value, and values evenly between them. Several settings are
    the base's own values, then the points of a scrambled Sobol sequence. All combinations of choices are taken in order
    where the trials suffice for them. More candidates than `trials` follow, for those that make no model.
    Raises `InputError` where there are fewer.

    >>> [one["train.lr"] for one in islice(spread({"train.lr": Search(uniform=(0, 1))}, 3, {"train.lr": 0.2}), 3)]
    [0.0, 0.2, 1.0]
    """
    found = _different(searched, islice(_drawn(searched, trials, own), MOST_DRAWN * trials + trials))
    first = list(islice(found, trials))
    if len(first) < trials:
        raise InputError(f"trials {trials}: there are only {len(first)} candidates to try")
    return chain(first, found)


def _different(searched: Mapping[str, Search], drawn: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What exists of each that is drawn, if none before it was the same."""
    seen = set()
    for one in drawn:
        candidate = _existing(searched, one)
        if (written := json.dumps(candidate, sort_keys=True)) not in seen:
            seen.add(written)
            yield candidate


def _existing(searched: Mapping[str, Search], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the settings whose condition holds. A setting comes in `searched` after those in its condition."""
    found: dict[str, Any] = {}
    for path, search in searched.items():
        if search.exists(found):
            found[path] = drawn[path]
    return found


def beyond(searched: Mapping[str, Search], tried: list[dict[str, Any]], path: str, *, above: bool) -> dict[str, Any]:
    """The candidate after the lowest or the highest value tried of a range, as far from it as its neighbour is.

    Other settings keep the values that they have beside that end.

    >>> lr = {"train.lr": Search(log_uniform=(1e-3, 1e-1))}
    >>> beyond(lr, [{"train.lr": 0.01}, {"train.lr": 0.1}], "train.lr", above=True)
    {'train.lr': 1.0}
    """
    search = searched[path]
    values = sorted({candidate[path] for candidate in tried})
    end, neighbour = (values[-1], values[-2]) if above else (values[0], values[1])
    value = end * end / neighbour if search.log_uniform else 2 * end - neighbour
    beside = next(candidate for candidate in reversed(tried) if candidate[path] == end)
    return {**beside, path: _rounded(value)}


def edge(searched: Mapping[str, Search], tried: list[dict[str, Any]], best: Mapping[str, Any]) -> dict[str, str]:
    """The searched ranges of which a candidate has the lowest or the highest value tried: path -> which.

    >>> edge({"train.lr": Search(uniform=(0, 1))}, [{"train.lr": 0.1}, {"train.lr": 0.5}], {"train.lr": 0.5})
    {'train.lr': 'highest'}
    """
    found = {}
    for path, search in searched.items():
        if search.choice is not None:
            numbers = [value for value in search.choice if isinstance(value, int | float) and value is not True]
            if len(numbers) < len(search.choice) or False in numbers:
                continue
        values = [candidate[path] for candidate in tried]
        if best[path] in (min(values), max(values)) and min(values) < max(values):
            found[path] = "lowest" if best[path] == min(values) else "highest"
    return found


def _drawn(searched: Mapping[str, Search], trials: int, own: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    choices = [search.choice for search in searched.values()]
    if (size := count(searched)) is not None and size <= trials:
        yield from combinations(searched)
        return
    if len(searched) == 1 and choices == [None]:
        ((path, search),) = searched.items()
        yield from ({path: value} for value in _grid(search, trials, own[path]))
    else:
        inside = all(search.choice is None or own[path] in search.choice for path, search in searched.items())
        if inside:
            yield {path: own[path] for path in searched}
    if len(searched) == 1:
        ((path, search),) = searched.items()
        halves = (int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, MOST_DRAWN * trials))
        yield from ({path: _at(search, x)} for x in halves)  # 1/2, 1/4, 3/4, 1/8, ...
        return
    from scipy.stats import qmc  # Load it here, since it takes a second and a single setting needs none of it.

    points = qmc.Sobol(len(searched), scramble=True, rng=0).random_base2(math.ceil(math.log2(MOST_DRAWN * trials)))
    for point in points:
        yield {path: _at(search, float(x)) for (path, search), x in zip(searched.items(), point, strict=True)}


def _grid(search: Search, trials: int, own: Any) -> list[Any]:
    """The base's own value, both ends, and values evenly between: of the ends the farther one, if there is but one."""

    def even(count: int) -> list[Any]:
        return [_at(search, i / max(count - 1, 1)) for i in range(count)]

    if not isinstance(own, int | float) or isinstance(own, bool) or own in search.extremes:
        return even(trials)
    low, high = (_place(search, end) for end in search.extremes)
    share = (_place(search, own) - low) / (high - low)
    if not 0 < share < 1:
        return [own, *even(trials - 1)]
    if trials < 3:
        return [own, _at(search, 1.0 if share < 0.5 else 0.0)][:trials]
    below = above = 1
    for _ in range(trials - 3):
        if share / below >= (1 - share) / above:
            below += 1
        else:
            above += 1
    lower = [_at(search, share * i / below) for i in range(below)]
    return [*lower, own, *(_at(search, share + (1 - share) * i / above) for i in range(1, above + 1))]


def _place(search: Search, value: float) -> float:
    """Where a value is on the scale of its range."""
    if search.log_uniform:
        return math.log(value) if value > 0 else -math.inf
    return float(value)


def _at(search: Search, x: float) -> Any:
    """The value at x in [0, 1] of a setting's range or choices."""
    if search.choice is not None:
        return search.choice[min(int(x * len(search.choice)), len(search.choice) - 1)]
    low, high = search.extremes
    if search.integers:
        return low + min(int(x * (high - low + 1)), high - low)
    if search.log_uniform:
        return _rounded(low * (high / low) ** x)
    return _rounded(low + (high - low) * x)


def _rounded(value: float) -> float:
    """A value in four digits, the same on every processor.

    >>> _rounded(0.0158113883)
    0.01581
    """
    return float(f"{value:.4g}") if isinstance(value, float) else value
