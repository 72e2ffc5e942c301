"""Draws the candidates of tuning: spread over the ranges, the same for all arms, independent of results.

This module also names the candidates of tuning and of a search.
"""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any

from deltalab.errors import InputError
from deltalab.store.models import Stage
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.sections.search_space import Search, combinations, count_combinations

MOST_DRAWN = 20
"""How many candidates are drawn at most per candidate wanted: some make no model, some are drawn twice."""
RANDOM_FROM = 1_000_000
"""The number of the first candidate of a search's random control; the numbers of the sampler begin at 0."""
WARM_FROM = 2_000_000
"""The number of the first candidate that a search is given to begin with."""
PROPOSED_FROM = 3_000_000
"""The number of the first candidate that a program proposed."""


def trial_name(arm: str, stage: Stage, number: int, trials: int | None) -> str:
    """Names a trial for people. The name of a search's candidate leaves out the arm.

    Args:
        arm: The trial's arm.
        stage: The trial's stage.
        number: The number of the trial's candidate, from 0.
        trials: The trials of the study's search; None if the study is no search.

    Examples:
        >>> [trial_name("base", "tune", number, 64) for number in (7, 1_000_002, 2_000_000)]
        ['candidate 7', 'random candidate 2', 'warm candidate 0']
        >>> trial_name("found_1", "confirm", 0, 64), trial_name("late", "confirm", 3, None)
        ('found_1, training 0', 'late, candidate 3')
    """
    if trials is None:
        return f"{arm}, candidate {number}"
    if stage == "confirm":
        return f"{arm}, training {number}"
    if number >= RANDOM_FROM:
        kind = "random" if number < WARM_FROM else "warm" if number < PROPOSED_FROM else "proposed"
        return f"{kind} candidate {number % RANDOM_FROM}"
    training = number - MOST_DRAWN * trials
    return f"candidate {number}" if training < 0 else f"{arm}, training {training}"


def recorded_trial_name(spec: Mapping[str, Any], arm: str, stage: Stage, number: int) -> str:
    """Names a recorded trial: as `trial_name` does in a search, else by its arm, stage and number.

    Args:
        spec: The study as the ledger has it.
        arm: The trial's arm.
        stage: The trial's stage.
        number: The number of the trial's candidate.
    """
    candidates = RecordedSpec(spec).candidates
    return f"{arm}, {stage} {number}" if candidates is None else trial_name(arm, stage, number, candidates)


def spread_candidates(
    searched: Mapping[str, Search], trials: int, written: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Draws candidates that depend on the ranges, on their number and on the values that the base states, alone.

    A single range gives a grid of both ends, the base's value, and values evenly between them. Several settings give
    the base's values, then the points of a scrambled Sobol sequence. If the trials suffice for all combinations of
    choices, these are taken in order. More candidates than `trials` follow, in place of any that make no model.

    Args:
        searched: The settings to vary.
        trials: How many candidates are wanted.
        written: The values that the base states.

    Raises:
        InputError: There are fewer candidates than `trials`.

    Examples:
        >>> lr = {"train.lr": Search(uniform=(0, 1))}
        >>> [values["train.lr"] for values in islice(spread_candidates(lr, 3, {"train.lr": 0.2}), 3)]
        [0.0, 0.2, 1.0]
    """
    candidates = _different(searched, islice(_drawn(searched, trials, written), MOST_DRAWN * trials + trials))
    first = list(islice(candidates, trials))
    if len(first) < trials:
        raise InputError(f"trials {trials}: there are only {len(first)} candidates to try")
    return chain(first, candidates)


def _different(searched: Mapping[str, Search], drawn: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each candidate once, without the settings whose condition does not hold."""
    seen = set()
    for values in drawn:
        candidate = _existing(searched, values)
        if (text := json.dumps(candidate, sort_keys=True)) not in seen:
            seen.add(text)
            yield candidate


def _existing(searched: Mapping[str, Search], drawn: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the settings whose condition holds; `searched` lists a setting after those in its condition."""
    values: dict[str, Any] = {}
    for path, search in searched.items():
        if search.exists(values):
            values[path] = drawn[path]
    return values


def beyond(searched: Mapping[str, Search], tried: list[dict[str, Any]], path: str, *, above: bool) -> dict[str, Any]:
    """The candidate one step beyond an end of the values tried of a range.

    The step is as long as the step from that end to its neighbour. Other settings keep the values that they have at
    that end.

    Args:
        searched: The settings that vary.
        tried: The candidates so far.
        path: The setting to move.
        above: Whether to step beyond the highest value, not below the lowest.

    Examples:
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
    """Lists the settings of which a candidate has the lowest or the highest value tried: path -> "lowest" or "highest".

    Examples:
        >>> edge({"train.lr": Search(uniform=(0, 1))}, [{"train.lr": 0.1}, {"train.lr": 0.5}], {"train.lr": 0.5})
        {'train.lr': 'highest'}
    """
    ends = {}
    for path, search in searched.items():
        if search.choice is not None:
            numbers = [value for value in search.choice if isinstance(value, int | float) and value is not True]
            if len(numbers) < len(search.choice) or False in numbers:
                continue
        values = [candidate[path] for candidate in tried]
        if best[path] in (min(values), max(values)) and min(values) < max(values):
            ends[path] = "lowest" if best[path] == min(values) else "highest"
    return ends


def _drawn(searched: Mapping[str, Search], trials: int, written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Draws candidates as `spread_candidates` describes them, some of them twice."""
    choices = [search.choice for search in searched.values()]
    if (size := count_combinations(searched)) is not None and size <= trials:
        yield from combinations(searched)
        return
    if len(searched) == 1 and choices == [None]:
        ((path, search),) = searched.items()
        yield from ({path: value} for value in _grid(search, trials, written[path]))
    else:
        inside = all(search.choice is None or written[path] in search.choice for path, search in searched.items())
        if inside:
            yield {path: written[path] for path in searched}
    if len(searched) == 1:
        ((path, search),) = searched.items()
        halves = (int(f"{i:b}"[::-1], 2) / 2 ** i.bit_length() for i in range(1, MOST_DRAWN * trials))
        yield from ({path: _at(search, x)} for x in halves)  # 1/2, 1/4, 3/4, 1/8, ...
        return
    from scipy.stats import qmc  # Loading scipy.stats takes a second, and a single setting does not need it.

    points = qmc.Sobol(len(searched), scramble=True, rng=0).random_base2(math.ceil(math.log2(MOST_DRAWN * trials)))
    for point in points:
        yield {path: _at(search, float(x)) for (path, search), x in zip(searched.items(), point, strict=True)}


def _grid(search: Search, trials: int, written: Any) -> list[Any]:
    """The base's value, both ends, and values evenly between them; with room for one end, the farther one."""

    def even(points: int) -> list[Any]:
        return [_at(search, i / max(points - 1, 1)) for i in range(points)]

    if not isinstance(written, int | float) or isinstance(written, bool) or written in search.extremes:
        return even(trials)
    low, high = (_place(search, end) for end in search.extremes)
    share = (_place(search, written) - low) / (high - low)
    if not 0 < share < 1:
        return [written, *even(trials - 1)]
    if trials < 3:
        return [written, _at(search, 1.0 if share < 0.5 else 0.0)][:trials]
    below = above = 1
    for _ in range(trials - 3):
        if share / below >= (1 - share) / above:
            below += 1
        else:
            above += 1
    lower = [_at(search, share * i / below) for i in range(below)]
    return [*lower, written, *(_at(search, share + (1 - share) * i / above) for i in range(1, above + 1))]


def _place(search: Search, value: float) -> float:
    """Returns the place of a value on the scale of its range: its logarithm if the range is logarithmic."""
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
    """Rounds a value to four digits, which are the same on every processor.

    Examples:
        >>> _rounded(0.0158113883)
        0.01581
    """
    return float(f"{value:.4g}") if isinstance(value, float) else value
