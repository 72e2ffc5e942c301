"""Makes the looks of a study from its key `seeds`, also those at a study that was tested before.

A guide says how many seeds would decide an arm.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from deltalab.statistics.joint_test import ALPHA, Look, flips, one_look, seeds_needed

FURTHER = ALPHA / 20
"""What the first further look adds to the error of a study. Each next look adds half as much as the one before."""
IN_ALL = 1.1 * ALPHA
"""What all looks together may err."""
BY_CHOICE = 1.5
"""A further look whose seeds the data choose errs at most so many times as often as one with given seeds: 1.3 to 1.46
times in simulations (docs/decisions/017)."""


def looks_of(seeds: int | Mapping[str, Any]) -> tuple[Look, ...]:
    """Returns the looks of a study.

    Args:
        seeds: The key `seeds` of its file: a number, `at_least` and `at_most`, `after` and `at_most`, or `arms` and
            `base`, whose looks are those of the arms.

    Examples:
        >>> looks = looks_of({"after": {"after": 6, "at_most": 9}, "at_most": 20})
        >>> [(look.seeds, round(look.spent, 5)) for look in looks]
        [(6, 0.05), (9, 0.04708), (20, 0.04833)]
    """
    if isinstance(seeds, int):
        return one_look(seeds)
    if "arms" in seeds:
        return one_look(seeds["arms"])
    if "after" in seeds:
        return further_look(looks_of(seeds["after"]), seeds["at_most"])
    return spread_looks(**seeds)


def seeds_of_base(seeds: int | Mapping[str, Any]) -> int | None:
    """Returns how many seeds the base has if they are more than those of an arm, else None.

    Args:
        seeds: The key `seeds` of a study's file.
    """
    return None if isinstance(seeds, int) else seeds.get("base")


def trained_in_parts(seeds: int | Mapping[str, Any], *, is_base: bool, one_by_one: bool = False) -> tuple[int, ...]:
    """Returns how many seeds an arm has trained after each trial of a candidate, if it does not stop before the last.

    The base trains its further seeds in a trial of their own, so that those of the arms are a trial that other studies
    may have.

    Args:
        seeds: The key `seeds` of the study's file.
        is_base: Whether the arm is the base.
        one_by_one: Whether each seed is a trial of its own, as in a study with an engine, whose runs take hours.

    Examples:
        >>> trained_in_parts({"arms": 6, "base": 16}, is_base=True), trained_in_parts(7, is_base=True)
        ((6, 16), (7,))
        >>> trained_in_parts(3, is_base=True, one_by_one=True)
        (1, 2, 3)
    """
    parts = tuple(look.seeds for look in looks_of(seeds))
    further = seeds_of_base(seeds) if is_base else None
    parts = parts if further is None else (*parts, further)
    return tuple(range(1, parts[-1] + 1)) if one_by_one else parts


def spread_looks(at_least: int, at_most: int, alpha: float = ALPHA) -> tuple[Look, ...]:
    """Plans up to four looks from `at_least` to `at_most` seeds, with alpha (seeds / at_most)^1.5 spent by each.

    This rule leaves most of alpha to the later looks, which find most differences. The first look may be able only to
    stop arms without a prospect: with 6 seeds of 15, no arm can be decided.

    Examples:
        >>> [(look.seeds, round(look.spent, 4)) for look in spread_looks(6, 15)]
        [(6, 0.0126), (8, 0.0195), (11, 0.0314), (15, 0.05)]

    References:
        Kim and DeMets 1987, the power family.
    """
    seeds = dict.fromkeys(round(at_least * (at_most / at_least) ** (i / 3)) for i in range(4))
    return tuple(Look(n, alpha * (n / at_most) ** 1.5, n == at_most) for n in seeds)


def further_look(looks: Sequence[Look], seeds: int) -> tuple[Look, ...]:
    """Adds a look, with more seeds, to those at which a study was tested.

    What the flips of the last look could not spend adds to what the further look may err. After six seeds this is so
    much that seeds chosen on the data would carry all looks together beyond `IN_ALL`, so that a part is left unspent.

    Args:
        looks: The looks so far, whose last spent all of the error that it was allowed.
        seeds: The seeds of the further look.
    """
    last, further = looks[-1], sum(look.is_last for look in looks) - 1
    used = _used(last)
    most = used + (IN_ALL - used) / BY_CHOICE
    return (*looks, Look(seeds, min(last.spent + FURTHER / 2**further, most), is_last=True))


def left_error(looks: Sequence[Look]) -> float:
    """Returns the error that a further look may make: its own, and what the flips of the last look could not spend.

    Examples:
        >>> round(left_error(one_look(6)), 5), round(left_error(one_look(12)), 5)
        (0.01583, 0.0027)
    """
    return further_look(looks, looks[-1].seeds + 1)[-1].spent - _used(looks[-1])


def _used(look: Look) -> float:
    """Returns the share of all flips that may count as decided after a look, in whole flips."""
    count = len(flips(look.seeds))
    return math.floor(look.spent * count * (1 + 1e-9)) / count


def seeds_to_decide(
    differences: ArrayLike, arms: int, power: float = 0.8, *, margin: float = 0.0, alpha: float = ALPHA
) -> int | None:
    """Estimates how many seeds would decide an arm's difference.

        n = ((z + z_power) sd / e)^2 + z^2 / 2

    This is a t test with Bonferroni's correction for m arms: e = |mean| and z = z_{1 - alpha / 2m} to tell it from 0,
    or e = margin - |mean| and z = z_{1 - alpha / m} to find it equal, whichever takes fewer seeds. The number is a
    guide, since the formula takes the mean and the standard deviation of the differences so far for the true ones.

    Args:
        differences: The differences d [n] of one arm, which is not decided so far.
        arms: How many arms are tested together.
        power: The probability that so many seeds decide the difference.
        margin: The least difference that matters.
        alpha: The error of the test that decides.

    Returns:
        The number of seeds, at least one more than there are; None if the seeds agree on 0, without a margin, or are
        fewer than two.

    Examples:
        >>> seeds_to_decide([0.1, -0.1, 0.2, 0.0, 0.1, 0.0], arms=1), seeds_to_decide([0.0, 0.0, 0.0], arms=1)
        (37, None)

    References:
        Guenther 1981.
    """
    from scipy.special import ndtri  # Imported here: plans need no SciPy. scipy.stats takes a second.

    d = np.asarray(differences, dtype=float)
    off = abs(float(d.mean())) if len(d) else 0.0
    effects = [(e, sides) for e, sides in ((off, 2), (margin - off, 1)) if e > 0]
    if len(d) < 2 or not effects:
        return None
    z_power, sd = float(ndtri(power)), float(d.std(ddof=1))
    needed = []
    for effect, sides in effects:
        z = float(ndtri(1 - alpha / (sides * max(arms, 1))))
        needed.append(math.ceil(((z + z_power) * sd / effect) ** 2 + z**2 / 2))
    n = min(needed)
    return max(n, len(d) + 1, seeds_needed(alpha))
