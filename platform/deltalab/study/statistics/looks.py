"""Makes the looks of a study from its key `seeds`, also those at a study that was tested before."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from deltalab.study.statistics.joint_test import ALPHA, Look, flips, one_look, spread_looks

FURTHER = ALPHA / 20
"""What the first further look adds to the error of a study. Each next look adds half as much as the one before."""


def looks_of(seeds: int | Mapping[str, Any]) -> tuple[Look, ...]:
    """Returns the looks of a study.

    Args:
        seeds: The key `seeds` of its file: a number, `at_least` and `at_most`, or `after` and `at_most`.

    Examples:
        >>> looks = looks_of({"after": {"after": 6, "at_most": 9}, "at_most": 20})
        >>> [(look.seeds, round(look.spent, 5)) for look in looks]
        [(6, 0.05), (9, 0.0525), (20, 0.05375)]
    """
    if isinstance(seeds, int):
        return one_look(seeds)
    if "after" in seeds:
        return further_look(looks_of(seeds["after"]), seeds["at_most"])
    return spread_looks(**seeds)


def further_look(looks: Sequence[Look], seeds: int) -> tuple[Look, ...]:
    """Adds a look, with more seeds, to those at which a study was tested.

    Args:
        looks: The looks so far, whose last spent all of the error that it was allowed.
        seeds: The seeds of the further look.
    """
    further = sum(look.spent >= ALPHA for look in looks) - 1
    return (*looks, Look(seeds, looks[-1].spent + FURTHER / 2**further))


def left_error(looks: Sequence[Look]) -> float:
    """Returns the error that a further look may make: its own, and what the flips of the last look could not spend.

    Examples:
        >>> round(left_error(one_look(6)), 5), round(left_error(one_look(12)), 5)
        (0.02125, 0.0027)
    """
    last, count = looks[-1], len(flips(looks[-1].seeds))
    return further_look(looks, last.seeds + 1)[-1].spent - math.floor(last.spent * count * (1 + 1e-9)) / count
