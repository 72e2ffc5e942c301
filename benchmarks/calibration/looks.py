"""Error, power and seeds of tests in several looks, which a study plans or adds later.

A study adds a look because a report said how many seeds would decide.
"""

from collections.abc import Iterator
from typing import Any

from calibration.many_studies import ARMS, Bench, differences, follow, normal
from calibration.seed_choices import told

from deltalab.statistics import joint_test
from deltalab.statistics.joint_test import one_look
from deltalab.statistics.looks import further_look, left_error, seeds_to_decide, spread_looks

LOOKS = (6, 15)
MOST_SEEDS = 30
"""Who is told to take more seeds takes so many."""
SHARE = 6
"""There are fewer studies that add looks by this factor: each goes through deltalab's own statistics."""


def sequential(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures error, power and seeds of a sequential design, with a fixed design of the same power."""
    looks, repeats = spread_looks(*LOOKS), max(1, bench.repeats // 2)
    for effects, size in ((0, 0.0), (1, 1.5), (1, 2.0), (2, 2.0)):
        scores = normal(bench.random, repeats, LOOKS[1])
        scores[:, 1 : 1 + effects] += size
        d = differences(scores)
        told, counts, _ = follow(d, looks)
        few = slice(bench.checked.per // 4)  # a study takes most of a second
        bench.checked.add(d[few], looks, told[few], counts[few])
        runs = counts.sum(1) + counts.max(1)  # the base goes on while any arm does
        row: dict[str, Any] = {
            "effects": effects,
            "size": size,
            "error": float(told[:, effects:].any(1).mean()),
            "seeds_per_arm": float(runs.mean() / (1 + ARMS)),
        }
        if effects:
            row["power"] = float(told[:, :effects].mean())
            row["fixed_seeds"] = as_powerful(bench, effects, size, row["power"])
            row["ratio"] = row["seeds_per_arm"] / row["fixed_seeds"]
        yield row


def as_powerful(bench: Bench, effects: int, size: float, power: float) -> float:
    """Returns the number of seeds with which a fixed design has a power, interpolated."""
    before = 0.0
    for seeds in range(6, 40):
        scores = normal(bench.random, bench.repeats, seeds)
        scores[:, 1 : 1 + effects] += size
        measured = float(follow(differences(scores), one_look(seeds))[0][:, :effects].mean())
        if measured >= power:
            return seeds - (measured - power) / (measured - before) if before else float(seeds)
        before = measured
    raise AssertionError(f"no fixed design of fewer than 40 seeds has a power of {power}")


def further_looks(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the share of studies of equal arms that find a difference, at once or after one or two further tests.

    Each further test has the seeds that would decide the arm that is nearest to a verdict.
    """
    studies = max(1, bench.repeats // SHARE)
    for arms in (1, 3, 7):
        for first in (6, 7, 9):
            before, now = [0, 0, 0], [0, 0, 0]
            for _ in range(studies):
                scores = bench.random.normal(size=(1 + arms, MOST_SEEDS))
                of_arms = scores[1:] - scores[0]
                for counts, is_look in ((before, False), (now, True)):
                    looks, found = one_look(first), False
                    for test in range(3):
                        found = found or any(told(o) for o in joint_test.follow(of_arms, looks, intervals=False))
                        counts[test] += found
                        seeds, error = looks[-1].seeds, left_error(looks) if is_look else 0.05
                        if seeds == MOST_SEEDS:
                            continue
                        hints = (seeds_to_decide(d[:seeds], arms, alpha=error) for d in of_arms)
                        wanted = min((hint for hint in hints if hint), default=MOST_SEEDS)
                        more = min(max(wanted, seeds + 1), MOST_SEEDS)
                        looks = further_look(looks, more) if is_look else one_look(more)
            shares = {
                f"{name}_{i}": count / studies
                for name, counts in (("before", before), ("now", now))
                for i, count in enumerate(counts)
            }
            yield {"arms": arms, "seeds": first, "studies": studies, **shares}
