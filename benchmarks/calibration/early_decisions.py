"""How far the means of differences that were decided early are from the truth, and the estimates beside them.

Every study goes through deltalab's own statistics.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from calibration.looks import LOOKS
from calibration.many_studies import Array, Bench

from deltalab.statistics.joint_test import Outcome, follow
from deltalab.statistics.looks import spread_looks

SIZES = (0.5, 0.75, 1.0, 1.25, 2.0)
"""True differences, in standard deviations of a seed's score."""
SHARES = {1: 5, 3: 18, 7: 18}
"""By the number of arms, the factor by which there are fewer studies here: one of seven arms takes 0.3 s."""


def normal(random: np.random.Generator, arms: int) -> Array:
    """Draws scores of the base and the arms, [1 + arms, seeds]."""
    return random.normal(size=(1 + arms, LOOKS[1]))


def skewed(random: np.random.Generator, arms: int) -> Array:
    """Draws normal scores of the base, and exponential ones of the arms."""
    return np.vstack([normal(random, 0), random.exponential(size=(arms, LOOKS[1])) - 1])


SCORES: dict[str, Callable[[np.random.Generator, int], Array]] = {"normal": normal, "skewed": skewed}


def early_decisions(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures how far means and estimates are from the truth, for arms that were decided early, given up, or ended.

    One arm of each study differs from the base.
    """
    for (arms, share), (kind, (scores, draw)) in product(SHARES.items(), enumerate(SCORES.items())):
        # A source of its own, so that the cells of the table can be computed apart.
        random, studies = np.random.default_rng(100 + arms + 7 * kind), max(1, bench.repeats // share)
        outcomes: dict[float, list[Outcome]] = {size: [] for size in SIZES}
        for _ in range(studies):
            for size, of_size in outcomes.items():
                drawn = draw(random, arms)
                drawn[1] += size
                of_size.append(follow(list(drawn[1:] - drawn[0]), spread_looks(*LOOKS))[0])
        for size, of_size in outcomes.items():
            yield {"arms": arms, "scores": scores, "size": size, "studies": studies, **summary(of_size, size)}


def summary(outcomes: Sequence[Outcome], size: float) -> dict[str, Any]:
    """Summarizes means and estimates, each over the true difference, by what ended the arms."""
    ended: dict[str, list[Outcome]] = {"early": [], "given_up": [], "last": [], "not_given_up": []}
    for outcome in outcomes:
        last = outcome.difference.n == LOOKS[1]
        ended["last" if last else "early" if outcome.stopped == "decided" else "given_up"].append(outcome)
    ended["not_given_up"] = ended["early"] + ended["last"]
    groups: dict[str, Any] = {}
    for group, found in ended.items():
        groups[group] = {"share": len(found) / len(outcomes)}
        if found:
            groups[group]["mean"] = errors([outcome.difference.mean / size for outcome in found])
        if found and group != "given_up":
            groups[group]["unbiased"] = errors([of.unbiased / size for of in found if of.unbiased is not None])
    return groups


def errors(ratios: Sequence[float]) -> dict[str, float]:
    """Returns how estimates over the truth are distributed."""
    of = np.array(ratios)
    return {
        "average": float(of.mean()),
        "median": float(np.median(of)),
        "above": float((of > 1).mean()),
        "rmse": float(np.sqrt(((of - 1) ** 2).mean())),
    }
