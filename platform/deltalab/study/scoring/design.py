"""Designs the two stages of a score, so that a loop of any length keeps a rule by noise in at most 5% of loops.

Screening trains a proposal with the study's own seeds. Most proposals end there. A promising one is confirmed: rule and
base train anew, on seeds that nothing of the loop has trained with. Whatever the loop has seen, the p-value of a
confirmation is then that of a single test,

    P(p_j <= alpha_j | all before) <= alpha_j    for a rule that is no better than the base,

so that P(a rule is kept that is no better) <= sum_j alpha_j <= ALPHA. Screening spends nothing: it only decides what is
confirmed. LOND, alpha-investing and SAFFRON bound the share of false keeps among all keeps, and need p-values that do
not depend on what was seen before. A program that improves on the same seeds breaks them (benchmarks/score_loops.json).

The confirmations come in blocks of 32, 64, 128, ... The first block shares half of ALPHA evenly, the next a quarter,
and so on. Screening lets a tenth of noise pass, so that 200 proposals of noise take about 20 confirmations.
"""

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from deltalab.statistics.joint_test import ALPHA
from deltalab.statistics.pairs import Paired

FIRST_BLOCK = 32
"""The confirmations that share half of ALPHA."""
SCREENED = 0.1
"""The share of noise that screening lets pass."""
GAIN = 1.5
"""The gain that a confirmation is sized for, in standard deviations of a seed's score."""
POWER = 0.95
"""How often a confirmation finds such a gain, if the seeds of rule and base have nothing in common."""
SEEDS_FROM = 2001
"""The first seed of the first confirmation, beyond the 1,000 seeds that a study has at most from its first on."""
MOST_SEEDS = 100
"""The seeds that each confirmation has to itself. The smallest alpha that it is sized for is about 1e-20."""
RESOLUTION = 20
"""How many exchanges out of all that are drawn have a p-value of at most alpha, one of them the observed."""
AT_ONCE = 2**10
"""How many exchanges are computed at a time."""


def alpha_of(confirmation: int) -> float:
    """Returns the error that a confirmation may spend.

    Args:
        confirmation: The number of the confirmation in its loop, from 1.

    Examples:
        >>> [alpha_of(n) * 2**6 / ALPHA for n in (1, 32, 33, 96, 97)]
        [1.0, 1.0, 0.25, 0.25, 0.0625]
    """
    block = (((confirmation - 1) // FIRST_BLOCK) + 1).bit_length() - 1
    return float(ALPHA / 2 ** (block + 1) / (FIRST_BLOCK * 2**block))


def seeds_of(confirmation: int) -> int:
    """Returns how many fresh seeds a confirmation has.

    They find a gain of `GAIN` with a probability of `POWER`. The last term allows for the spread being estimated.

    Examples:
        >>> [seeds_of(n) for n in (1, 33, 97)]
        [26, 31, 35]
    """
    critical = NormalDist().inv_cdf(1 - alpha_of(confirmation))
    needed = (critical + NormalDist().inv_cdf(POWER)) ** 2 * 2 / GAIN**2 + critical**2 / 2
    return math.ceil(needed)


def first_seed_of(confirmation: int) -> int:
    """Returns the first of a confirmation's seeds, which no other confirmation of the loop has."""
    return SEEDS_FROM + MOST_SEEDS * (confirmation - 1)


def is_promising(gains: ArrayLike) -> bool:
    """Returns whether screening lets gains [n] pass: their t exceeds the quantile that a tenth of noise exceeds.

    Examples:
        >>> is_promising([0.1, 0.2, 0.1, 0.2]), is_promising([0.1, -0.2, 0.1, 0.1]), is_promising([0, 0])
        (True, False, False)
    """
    from scipy.special import stdtrit  # Imported here, as in `statistics.intervals`: SciPy is slow to load.

    values = np.asarray(gains, dtype=float)
    mean, error = values.mean(), values.std(ddof=1) / math.sqrt(len(values))
    return bool(mean > 0 and mean >= stdtrit(len(values) - 1, 1 - SCREENED) * error)


def p_of(pairs: Paired, sign: int, alpha: float) -> float:
    """Tests "the rule is no better than the base" by exchanges of whole seeds, one-sided.

    As many exchanges are drawn as alpha needs, always the same, and the observed one counts among them: p is then exact
    for any distribution (Hemerik and Goeman 2018). Drawing ends early once p exceeds alpha for sure.

    Args:
        pairs: The runs of the rule and of the base on the same seeds.
        sign: 1 if more of the metric is better, -1 if less is.
        alpha: The error that p is compared with.

    Returns:
        The share of the exchanges drawn whose mean gain is at least the observed one.

    Examples:
        >>> from deltalab.statistics.pairs import Pairs
        >>> p_of(Pairs.plain([1.0] * 12), 1, 0.01) < 0.001, p_of(Pairs.plain([1.0] * 12), -1, 0.01)
        (True, 1.0)
    """
    gain = sign * pairs.differences.mean()
    least = gain - 1e-9 * np.abs(pairs.differences).mean()  # Gains that differ by rounding alone are equal.
    draw, wanted = np.random.default_rng(pairs.seeds), math.ceil(RESOLUTION / alpha)
    drawn = reached = 1
    while drawn < wanted and reached <= RESOLUTION:
        flipped = draw.integers(0, 2, (min(wanted - drawn, AT_ONCE), pairs.seeds), dtype=np.int8)
        signs = np.where(flipped, -1.0, 1.0)
        reached += int((sign * pairs.exchanged(signs).mean(axis=1) >= least).sum())
        drawn += len(signs)
    return reached / drawn
