"""False and right verdicts by a margin, the least difference that matters.

Every study goes through deltalab's own statistics.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from calibration.many_studies import Bench
from calibration.tuning_designs import CANDIDATES, SPLIT_NOISE

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import Look, follow, one_look
from deltalab.statistics.looks import spread_looks
from deltalab.statistics.pairs import Pairs

MARGIN = 1.0
"""In standard deviations of a seed's score."""
SHARE = 12
"""A study here takes about 20 ms, so that there are fewer of them by this factor."""
LOOKS: dict[str, tuple[Look, ...]] = {"8": one_look(8), "12": one_look(12), "6 to 15": spread_looks(6, 15)}


def margins(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures false and right verdicts where arms differ by the margin, upward or in turns, and where they are equal.

    In half of the studies, seeds tune among three candidates.
    """
    studies = max(1, bench.repeats // SHARE)
    for tuned in (False, True):
        for seeds, looks in LOOKS.items():
            for arms in (1, 3, 7):
                counts = dict.fromkeys(("equal_up", "equal_turns", "beyond", "equal", "different"), 0)
                for _ in range(studies):
                    samples = _samples(bench.random, 1 + arms, looks[-1].seeds, CANDIDATES if tuned else 1)
                    up, turns = np.full(arms, MARGIN), MARGIN * (-1.0) ** np.arange(arms)
                    for name, effects in (("up", up), ("turns", turns), ("none", 0 * up), ("large", 3 * up)):
                        pairs = [Pairs(s.shifted(e), samples[0]) for s, e in zip(samples[1:], effects, strict=True)]
                        found = [o.difference for o in follow(pairs, looks, margins=[MARGIN] * arms, intervals=False)]
                        if name in ("up", "turns"):
                            counts[f"equal_{name}"] += any(d.is_equal for d in found)
                            counts["beyond"] += any(d.is_beyond for d in found) if name == "up" else 0
                        elif name == "none":
                            counts["equal"] += found[0].is_equal
                        else:
                            counts["different"] += found[0].is_beyond
                shares = {key: count / studies for key, count in counts.items()}
                yield {"tuned": tuned, "seeds": seeds, "arms": arms, "studies": studies, **shares}


def _samples(random: np.random.Generator, arms: int, seeds: int, candidates: int) -> list[Sample]:
    """Draws the runs of arms that are alike, as `seed_choices.drawn` does."""
    shape = (arms, seeds, candidates)
    luck = random.normal(size=shape)
    validation, test = (luck + SPLIT_NOISE * random.normal(size=shape) for _ in range(2))
    return [Sample(v, t) for v, t in zip(validation, test, strict=True)]
