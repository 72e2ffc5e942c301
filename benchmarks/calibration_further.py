"""The part of benchmarks/calibration.py on studies that add seeds because a report said how many would decide.

Every study goes through deltalab's own statistics.
"""

from collections.abc import Iterator
from typing import Any

from calibration_choices import Bench, told

from deltalab.statistics.joint_test import follow, one_look
from deltalab.statistics.looks import further_look, left_error, seeds_to_decide

MOST_SEEDS = 30
"""Who is told to take more seeds takes so many."""
SHARE = 6


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
                differences = scores[1:] - scores[0]
                for counts, is_look in ((before, False), (now, True)):
                    looks, found = one_look(first), False
                    for test in range(3):
                        found = found or any(told(o) for o in follow(differences, looks, intervals=False))
                        counts[test] += found
                        seeds, error = looks[-1].seeds, left_error(looks) if is_look else 0.05
                        if seeds == MOST_SEEDS:
                            continue
                        hints = (seeds_to_decide(d[:seeds], arms, alpha=error) for d in differences)
                        wanted = min((hint for hint in hints if hint), default=MOST_SEEDS)
                        more = min(max(wanted, seeds + 1), MOST_SEEDS)
                        looks = further_look(looks, more) if is_look else one_look(more)
            shares = {
                f"{name}_{i}": count / studies
                for name, counts in (("before", before), ("now", now))
                for i, count in enumerate(counts)
            }
            yield {"arms": arms, "seeds": first, "studies": studies, **shares}
