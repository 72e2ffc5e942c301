"""Computes the verdicts of the joint test for many simulated studies at once, and compares some with deltalab's own.

`follow` computes p alone. The first studies of each kind also go through `deltalab.statistics.joint_test`, which must
find the same verdicts, and intervals that agree with them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from deltalab.statistics import joint_test
from deltalab.statistics.joint_test import ALPHA, Look, flips, one_look

ARMS = 7
"""Arms beside the base."""
EFFECT = 2.0
"""Standard deviations of a seed's score."""
AT_ONCE = 2_000_000
"""Statistics in memory at a time."""

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Constant = Callable[[Array, Array], Array | float]
"""Computes c from the rms over seeds [R, arms, 1] and the sd over seeds under each flip [R, arms, E]."""

CONSTANTS: dict[str, Constant] = {
    "0: studentized alone": lambda rms, sd: 0.0,
    "median rms / 2": lambda rms, sd: np.median(rms, axis=1, keepdims=True) / 2,
    "median rms / sqrt(2)": lambda rms, sd: np.median(rms, axis=1, keepdims=True) / math.sqrt(2),
    "median rms": lambda rms, sd: np.median(rms, axis=1, keepdims=True),
    "median rms x sqrt(2)": lambda rms, sd: np.median(rms, axis=1, keepdims=True) * math.sqrt(2),
    "lower quartile of rms": lambda rms, sd: np.quantile(rms, 0.25, axis=1, keepdims=True),
    "least rms": lambda rms, sd: rms.min(axis=1, keepdims=True),
    "median sd under each flip": lambda rms, sd: np.median(sd, axis=1, keepdims=True),
    "infinite: the plain mean": lambda rms, sd: 1e9 * rms.max(axis=1, keepdims=True),
}
USED = "median rms / sqrt(2)"
"""The constant of `deltalab.statistics.joint_test`."""


def follow(
    d: Array, looks: Sequence[Look], constant: Constant = CONSTANTS[USED], hopeless: float = joint_test.HOPELESS
) -> tuple[Mask, NDArray[np.int64], Mask]:
    """Computes `joint_test.follow` of many studies at once, without intervals.

    Args:
        d: The differences to the base [R, arms, seeds].
        looks: The looks.
        constant: The constant c of the statistic.
        hopeless: The prospect below which an arm is given up.

    Returns:
        The arms that are told from the base, the seeds that each arm took, and the arms that the family decided, each
        [R, arms].
    """
    per = max(1, AT_ONCE // (d.shape[1] * len(flips(looks[-1].seeds))))
    parts = [_follow(d[at : at + per], looks, constant, hopeless) for at in range(0, len(d), per)]
    told, seeds, members = (np.concatenate(part) for part in zip(*parts, strict=True))
    return told, seeds, members


def _follow(
    d: Array, looks: Sequence[Look], constant: Constant, hopeless: float
) -> tuple[Mask, NDArray[np.int64], Mask]:
    told, members = np.zeros(d.shape[:2], bool), np.zeros(d.shape[:2], bool)
    stop = np.full(d.shape[:2], looks[-1].seeds)
    running = np.ones(d.shape[:2], bool)
    for k, look in enumerate(looks):
        so_far = looks[: k + 1]
        rows = np.flatnonzero(running.any(1))
        while len(rows):  # step down
            p = p_values(d[rows], so_far, stop[rows], members[rows], constant)
            p[~running[rows] | members[rows]] = np.inf
            hit = p.min(1) <= ALPHA
            rows, arm = rows[hit], p.argmin(1)[hit]
            members[rows, arm] = True
        decided = members & running
        for j in range(d.shape[1]):
            rows = np.flatnonzero(decided[:, j])
            if len(rows):
                others = members[rows]
                others[:, j] = False
                decided[rows, j] = p_values(d[rows], so_far, stop[rows], others, constant)[:, j] <= ALPHA
        told |= decided
        ends = decided | (k == len(looks) - 1)
        if k < len(looks) - 1:
            ends |= prospects(d[..., : look.seeds], look.seeds / looks[-1].seeds) < hopeless
        stop[running & ends] = look.seeds
        running &= ~ends
    return told, stop, members


def p_values(d: Array, looks: Sequence[Look], stop: NDArray[np.int64], members: Mask, constant: Constant) -> Array:
    """Computes p of "no difference" for each arm [R, arms] that is not among the members."""
    signs = flips(looks[-1].seeds)
    gone = np.zeros((len(d), len(signs)), bool)
    for look in looks[:-1]:
        largest = _statistics(d, stop, members, signs[:, : look.seeds], constant).max(1)
        most = math.floor(look.spent * len(signs) * (1 + 1e-9)) - gone.sum(1)
        left = -np.sort(-np.where(gone, -1.0, largest), axis=1)
        bound = np.take_along_axis(left, np.clip(most, 0, len(signs) - 1)[:, None], axis=1)
        gone |= largest * joint_test._EQUAL > bound
    t = _statistics(d, stop, members, signs, constant)
    largest = t.max(1)
    observed = t[:, :, 0] * joint_test._EQUAL
    p = np.stack([(gone | (largest >= observed[:, j, None])).mean(1) for j in range(d.shape[1])], axis=1)
    return np.minimum(p * ALPHA / looks[-1].spent, 1.0)


def _statistics(d: Array, stop: NDArray[np.int64], members: Mask, signs: Array, constant: Constant) -> Array:
    """The statistics T [R, arms, E] under each flip."""
    n = signs.shape[1]
    counts = np.minimum(stop, n)[..., None]
    seen = np.arange(n) < counts
    x = d[..., :n]
    centred = (x - (x * seen).sum(-1, keepdims=True) / counts) * np.sqrt(counts / (counts - 1))
    x = np.where(members[..., None], centred, x)
    x = np.take_along_axis(x, np.arange(n) % counts, axis=-1)
    squares = (x**2).mean(-1, keepdims=True)
    mean = np.abs(x @ signs.T) / n
    sd = np.sqrt(np.maximum(squares - mean**2, 0.0) * (n / (n - 1)))
    size = sd + constant(np.sqrt(squares), sd)
    t: Array = math.sqrt(n) * np.divide(mean, size, out=np.zeros_like(mean), where=size > 0)
    return t


def prospects(d: Array, t: float) -> Array:
    """Computes `joint_test._prospect` of many arms [R, arms]."""
    n = d.shape[-1]
    spread = d.std(-1, ddof=1)
    ratio = np.divide(abs(d.mean(-1)), spread, out=np.full(spread.shape, np.inf), where=spread > 0)
    z = -stats.norm.ppf(stats.t.sf(math.sqrt(n) * ratio, n - 1))
    probability = stats.norm.cdf((z / math.sqrt(t) + stats.norm.ppf(ALPHA / (2 * d.shape[1]))) / math.sqrt(1 - t))
    return np.where(spread > 0, probability, d.any(-1))


def covered(d: Array, truth: Array, members: Mask) -> Mask:
    """Computes whether all intervals of a study hold the true differences [arms], after a single look [R]."""
    looks, stop, hold = one_look(d.shape[-1]), np.full(d.shape[:2], d.shape[-1]), np.ones(len(d), bool)
    per = max(1, AT_ONCE // (d.shape[1] * len(flips(d.shape[-1]))))
    for at in range(0, len(d), per):
        part = slice(at, at + per)
        for j in range(d.shape[1]):
            shifted, others = d[part].copy(), members[part].copy()
            shifted[:, j] -= truth[j]
            others[:, j] = False
            hold[part] &= p_values(shifted, looks, stop[part], others, CONSTANTS[USED])[:, j] > ALPHA
    return hold


@dataclass
class Checked:
    """Compares verdicts and intervals of `joint_test.follow` with the fast path.

    Attributes:
        per: The studies of each kind that are compared.
        studies: The number of studies so far.
        rows: The number of arms so far.
        contradictions: The number of arms whose interval contradicts p.
        differ: The number of arms whose verdict or seeds differ from the fast path.
    """

    per: int
    studies: int = 0
    rows: int = 0
    contradictions: int = 0
    differ: int = 0

    def add(self, d: Array, looks: Sequence[Look], told: Mask, seeds: NDArray[np.int64]) -> None:
        """Compares the first studies of a kind."""
        for study, verdicts, counts in list(zip(d, told, seeds, strict=True))[: self.per]:
            outcomes = joint_test.follow(list(study), looks)
            self.studies += 1
            for outcome, verdict, n in zip(outcomes, verdicts, counts, strict=True):
                difference = outcome.difference
                self.rows += 1
                self.contradictions += (difference.p <= ALPHA) != difference.decided
                self.differ += bool(difference.decided != verdict or difference.n != n)


@dataclass
class Bench:
    """The settings of a run of `benchmarks/calibrate.py`.

    Attributes:
        repeats: The studies of each kind.
        checked: The comparison with deltalab's statistics.
        random: The source of random numbers.
    """

    repeats: int
    checked: Checked
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(15))

    def single(self, d: Array) -> tuple[Mask, Mask]:
        """Returns the arms that fixed designs tell from the base, and the arms that the family decided."""
        looks = one_look(d.shape[-1])
        told, seeds, members = follow(d, looks)
        self.checked.add(d, looks, told, seeds)
        return told, members


def normal(random: np.random.Generator, repeats: int, seeds: int) -> Array:
    """Draws scores of the base and the arms [R, 1 + ARMS, seeds]."""
    return random.normal(size=(repeats, 1 + ARMS, seeds))


def differences(scores: Array) -> Array:
    """Returns the differences of the arms to the base."""
    return scores[:, 1:] - scores[:, :1]
