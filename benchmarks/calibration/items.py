"""Simulates evaluations of three models, and counts those whose intervals of differences all hold the truth.

    python benchmarks/calibration/items.py

prints the table of docs/explanation/statistics.md. Two models are compared with a third on three tasks, by items that
all models share.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deltalab.statistics import paired_items
from deltalab.statistics.paired_items import ItemPairs, compare_items

REPEATS = 2000
ITEMS = (16, 64, 200, 1000)
TASKS, MODELS = 3, 2
Array = NDArray[np.float64]
Drawn = tuple[Array, list[Array], float]
"""The scores of the first model, those of the others, and the true difference."""


def answers(right: float, lost: float, won: float) -> Callable[[np.random.Generator, int], Drawn]:
    """Draws answers, of which others lose and win these shares."""

    def draw(random: np.random.Generator, n: int) -> Drawn:
        first = random.random(n) < right
        others = []
        for _ in range(MODELS):
            chance = random.random(n)
            others.append(np.where(first, chance >= lost / right, chance < won / (1 - right)).astype(float))
        return first.astype(float), others, won - lost

    return draw


def losses(random: np.random.Generator, n: int) -> Drawn:
    """Draws losses of texts whose difficulty models share, with noise of two sizes."""
    hard = random.normal(9, 1, n)
    return hard + random.normal(0, 0.3, n), [hard + random.normal(0.1, 0.3 * m, n) for m in (1, 2)], 0.1


def skewed(
    value: Callable[[np.random.Generator, int], Array], mean: float
) -> Callable[[np.random.Generator, int], Drawn]:
    """Draws losses that differ by values with a mean."""

    def draw(random: np.random.Generator, n: int) -> Drawn:
        hard = random.normal(9, 1, n)
        return hard, [hard + value(random, n) for _ in range(MODELS)], mean

    return draw


def rare(share: float) -> Callable[[np.random.Generator, int], Drawn]:
    """Draws losses of which a share differs by an exponential value, and the others by noise of a tenth of it."""

    def value(random: np.random.Generator, n: int) -> Array:
        return (random.random(n) < share) * random.exponential(size=n) + random.normal(0, 0.1, n)

    return skewed(value, share)


KINDS = {
    "answers, 15% lost and 15% won": answers(0.5, 0.15, 0.15),
    "answers, 30% lost": answers(0.5, 0.3, 0.0),
    "answers, 5% lost": answers(0.9, 0.05, 0.0),
    "answers, 2% lost": answers(0.5, 0.02, 0.0),
    "losses": losses,
    "losses, differences as heavy-tailed as t of 4 degrees": skewed(lambda random, n: random.standard_t(4, n), 0.0),
    "losses, differences as skewed as an exponential value": skewed(lambda random, n: random.exponential(size=n), 1.0),
    "losses, differences as skewed as a lognormal value": skewed(
        lambda random, n: random.lognormal(size=n), float(np.exp(0.5))
    ),
    "losses, 20% of which differ": rare(0.2),
    "losses, 5% of which differ": rare(0.05),
}


def coverage(draw: Callable[[np.random.Generator, int], Drawn], n: int) -> float:
    """Returns the share of evaluations all of whose intervals hold the truth."""
    random, held = np.random.default_rng(1), 0
    for _ in range(REPEATS):
        pairs, truth = [], 0.0
        for task in range(TASKS):
            first, others, truth = draw(random, n)
            ids, ones = [f"{task} {i}" for i in range(n)], np.ones(n)
            pairs += [ItemPairs(ids, np.stack([first, ones], 1), np.stack([other, ones], 1)) for other in others]
        held += all(found.low <= truth <= found.high for found in compare_items(pairs))
    return held / REPEATS


if __name__ == "__main__":
    paired_items.DRAWS = 4000
    print("|  |", " | ".join(f"{n:,} items" for n in ITEMS), "|")
    print("| --- |", " | ".join("---" for _ in ITEMS), "|")
    for name, draw in KINDS.items():
        print(f"| {name} |", " | ".join(f"{coverage(draw, n):.3f}" for n in ITEMS), "|", flush=True)
