"""Tests all arms of a family against the base at once, and inverts the test into intervals.

d_js is the difference of arm j to the base at seed s. If the arm and the base perform alike, d_js and -d_js are equally
likely, for all arms together (joint symmetry): flip the sign e_s of whole seeds, the same for all arms, and compare

    T_j(e) = sqrt(n) |mean_s(e_s d_js)| / (sd_s(e_s d_js) + c),    c = median_j(rms_s(d_js)) / sqrt(2)

with the largest T of the family under every flip (max-T; Westfall and Young 1993). The test is exact for any number of
seeds, whatever the distribution, and n seeds can reach p = 2 / 2^n however many arms there are. Without the
constant c, an arm whose seeds hardly differ would dominate the maximum (Tusher, Tibshirani and Chu 2001). No flip
changes c, which is about the sd of one seed's score. With a larger c, the test finds more if all arms are equally
noisy, and less if one arm is noisier than the others: see `benchmarks/calibrate.py`.

A seed that tunes has several runs of arm and base. To flip it is to exchange all of them; then the runs of every seed
are weighed anew (`cross_fitting`), and e_s d_js stands for the differences of the results after the exchange.

The test steps down: an arm that was found to differ from the base stays in the family, so that all intervals hold
together, but with its mean subtracted from its differences, whose signs are flipped. Its runs are not exchanged: a mix
of runs of two unlike arms has weights that say nothing, and an arm whose runs diverge would widen all other intervals.

With several looks, an arm may be decided at each. Flips that an earlier look would have decided count as decided, and
look k may decide a share A_k of all flips, so that all looks together do not exceed the allowed error (Lan and DeMets
1983). Intervals hold at each look, whatever made the arm go on. An arm that stopped stays in the family, with its seeds
repeated; without it, the other arms would be tested as a smaller family. Whether an arm stops for want of prospect
depends on the data, and is not part of the exact argument; benchmarks/calibrate.py measures the error with such
stops.

With a margin m, the least difference that matters, an arm equals the base if "the difference is m" and "the difference
is -m" are both rejected by one-sided tests at 5% (Schuirmann 1987), which are tests of |d_js -/+ m| at 10%.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltalab.statistics.early_decision import Boundaries, futility, reach, unbiased
from deltalab.statistics.pairs import Paired, Pairs

ALPHA = 0.05
"""The probability that a family without a difference finds one."""
EXACT_UP_TO = 12
"""The most seeds for which all flips are used. With more seeds, a subgroup of 2^11 flips replaces all 2^(n - 1) flips;
the test stays exact."""
HOPELESS = 0.1
"""An arm stops if the probability that it is decided by the last look is below this."""

Array = NDArray[np.float64]
_EQUAL = 1 - 1e-9
"""Two statistics whose ratio is at least this count as equal, since they differ by rounding alone."""
_DUST = 1e-12
"""A number smaller than this share of the differences, or of their squares, counts as a rounding error."""


@dataclass(frozen=True)
class Look:
    """A test after some seeds.

    Attributes:
        seeds: The number of seeds.
        spent: The share of all flips that may count as decided after this look, including those of earlier looks.
        is_last: Whether a study was to end with this look. A further look may come after it.
    """

    seeds: int
    spent: float
    is_last: bool = False


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and an interval that holds jointly with the family's other intervals.

    All numbers are NaN if there is no pair.

    Attributes:
        mean: The mean.
        low: The lower end of the interval; minus infinity if so few seeds cannot decide anything.
        high: The upper end of the interval; infinite if so few seeds cannot decide anything.
        p: The p-value of "no difference", for the whole family. p <= 0.05 if and only if the interval leaves out 0.
        n: The number of pairs, or of the arm's seeds.
        margin: The least difference that matters.
        is_equal: Whether two one-sided tests say that the difference is smaller than the margin.
        of_base: The number of the base's seeds if they are more, and not paired with the arm's; None if they are.
    """

    mean: float
    low: float
    high: float
    p: float
    n: int
    margin: float = 0.0
    is_equal: bool = False
    of_base: int | None = None

    @property
    def decided(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0

    @property
    def is_beyond(self) -> bool:
        """Whether the interval lies beyond the margin, on either side."""
        return self.low > self.margin or self.high < -self.margin


@dataclass(frozen=True)
class Outcome:
    """An arm after the looks so far.

    Attributes:
        difference: The arm's difference to the base.
        stopped: Why the arm stopped; None if it goes on.
        unbiased: The difference without the optimism of an early decision, if there are several looks. None for an arm
            that goes on, was given up, equals the base or has no interval.
    """

    difference: Difference
    stopped: Literal["decided", "hopeless", "last"] | None
    unbiased: float | None = None


UNKNOWN = Difference(math.nan, math.nan, math.nan, math.nan, 0)
"""The difference of an arm without a pair."""


def one_look(seeds: int, alpha: float = ALPHA) -> tuple[Look, ...]:
    """Returns the plan of a single look, after all seeds."""
    return (Look(seeds, alpha, is_last=True),)


def smallest_p(n: int) -> float:
    """Returns the least p that n seeds can give, 2 / 2^n.

    Examples:
        >>> smallest_p(5), smallest_p(8)
        (0.0625, 0.0078125)
    """
    return min(1.0, 2.0 ** (1 - n))


def seeds_needed(alpha: float = ALPHA) -> int:
    """Returns the fewest seeds with which p can reach alpha, for any number of arms.

    Examples:
        >>> seeds_needed(), seeds_needed(0.01)
        (6, 8)
    """
    return next(n for n in range(1, 64) if smallest_p(n) <= alpha)


def compare(differences: Sequence[ArrayLike | Paired], units: Sequence[int] | None = None) -> list[Difference]:
    """Tests all arms together, on the same seeds.

    Args:
        differences: The differences d_j [n] of each arm, or its pairs where seeds tune.
        units: A number for each arm. Arms with the same number share a unit of measurement and the constant c. None
            means that all arms share a unit.

    Returns:
        The difference of each arm.

    Examples:
        >>> arms = compare([[0.1, 0.2, 0.1, 0.2, 0.1, 0.2], [0.1, -0.1, 0.1, -0.1, 0.2, -0.2]])
        >>> [(round(arm.mean, 2), arm.p, arm.decided) for arm in arms]
        [(0.15, 0.03125, True), (0.0, 1.0, False)]
    """
    pairs = _pairs(differences)
    seeds = max((arm.seeds for arm in pairs), default=0)
    return [outcome.difference for outcome in follow(pairs, one_look(seeds), units)]


def follow(
    differences: Sequence[ArrayLike | Paired],
    looks: Sequence[Look],
    units: Sequence[int] | None = None,
    *,
    margins: Sequence[float] | None = None,
    intervals: bool = True,
    afterwards: bool = False,
) -> list[Outcome]:
    """Tests the arms at each look in turn, until an arm that should go on lacks the seeds for the next look.

    Args:
        differences: The differences d_j [n_j] of each arm by seed, or its pairs where seeds tune. Seeds beyond those at
            which an arm stops are not used.
        looks: The looks.
        units: As in `compare`.
        margins: The least difference of each arm that matters; None if any difference does.
        intervals: Whether undecided arms get an interval. If not, their intervals are infinite, and the test takes a
            tenth of the time.
        afterwards: Whether another comparison said when arms stop, and all arms have the seeds of the first look. Then
            no arm stops for want of prospect, which would save no seeds. An arm that lacks the seeds for a look keeps
            its outcome, and the others go on.

    Returns:
        The outcome of each arm.
    """
    by_arm = _pairs(differences)
    family = _Family(by_arm, list(units or [0] * len(by_arm)), list(margins or [0.0] * len(by_arm)), intervals)
    outcomes = [Outcome(UNKNOWN, None)] * len(by_arm)
    passed: list[list[Boundaries]] = [[] for _ in by_arm]
    for k, look in enumerate(looks):
        running = [j for j in range(len(by_arm)) if j not in family.stopped]
        if afterwards:
            for j in [j for j in running if by_arm[j].seeds < look.seeds]:
                family.stop(j, looks[k - 1].seeds)
                running.remove(j)
        if not running or any(by_arm[j].seeds < look.seeds for j in running) or not look.seeds:
            break
        for j, difference in family.tested(running, looks[: k + 1]).items():
            d, low, high = by_arm[j].head(look.seeds).differences, difference.low, difference.high
            given_up = (math.inf, math.inf)
            if not look.is_last and not afterwards:  # Whoever looks further asks for the seeds of all arms.
                share = look.seeds / looks[-1].seeds
                given_up = futility(d, difference.margin, share, ALPHA / len(by_arm), HOPELESS)
            decided = reach(difference.mean, low, high) if k < len(looks) - 1 else 0.0
            passed[j].append(Boundaries(look.seeds, decided, given_up))
            stopped: Literal["decided", "hopeless", "last"] | None = None
            if difference.decided or difference.is_equal:
                stopped = "decided"
            elif k == len(looks) - 1:
                stopped = "last"
            elif given_up[0] <= abs(difference.mean) <= given_up[1]:
                stopped = "hopeless"
            estimate = None
            if stopped in ("decided", "last") and len(looks) > 1 and intervals:
                estimate = unbiased(d, passed[j], low, high) if math.isfinite(low) and not difference.is_equal else None
            outcomes[j] = Outcome(difference, stopped, estimate)
            if stopped:
                family.stop(j, look.seeds)
    return outcomes


def _pairs(differences: Sequence[ArrayLike | Paired]) -> list[Paired]:
    return [d if isinstance(d, Paired) else Pairs.plain(d) for d in differences]


def rejects(differences: Sequence[ArrayLike], shifts: ArrayLike, looks: Sequence[Look]) -> NDArray[np.bool_]:
    """Returns, for each of shifts [D], whether the test rejects "the first arm differs from the base by the shift".

    Args:
        differences: The differences d_j [n] of each arm.
        shifts: The shifts [D].
        looks: The looks so far; the test is that of the last of them.
    """
    family = _Family(_pairs(differences), [0] * len(differences), [0.0] * len(differences))
    return family.p(0, np.asarray(shifts, dtype=float), looks) <= ALPHA


def rejected_by_look(differences: Sequence[ArrayLike], looks: Sequence[Look]) -> Callable[[Array], NDArray[np.bool_]]:
    """Returns a function of shifts [D] that says for each look, [K, D], what `rejects` says of the looks up to it.

    Args:
        differences: The differences d_j [n] of each arm.
        looks: All looks.
    """
    family = _Family(_pairs(differences), [0] * len(differences), [0.0] * len(differences))
    return lambda shifts: np.array([family.p(0, shifts, looks[: k + 1]) <= ALPHA for k in range(len(looks))])


@cache
def flips(n: int) -> Array:
    """Returns the signs e [E, n] of all flips, the observed signs first.

    Of two flips with opposite signs throughout, which have the same T, only one is returned.

    Beyond `EXACT_UP_TO` seeds, the sign of each further seed is the product of the signs of three or more of the first
    seeds, chosen at random. So the flips form a group, and the first seeds take all their signs equally often, as
    earlier looks assume.
    """
    exact = min(n, EXACT_UP_TO)
    bits = (np.arange(2 ** (exact - 1))[:, None] >> np.arange(exact)) & 1
    factors = np.random.default_rng(0).permutation(bits)
    factors = factors[factors.sum(1) > 2][: n - exact]
    signs: Array = 1.0 - 2.0 * np.hstack([bits, bits @ factors.T % 2])
    signs.flags.writeable = False
    return signs


class _Family:
    """The arms that are tested together.

    Attributes:
        pairs: The runs of each arm and of the base.
        units: The unit of each arm.
        margins: The least difference of each arm that matters.
        intervals: Whether undecided arms get an interval.
        size: The largest root mean square of an arm's differences.
        stopped: The seeds at which arms stopped, by arm.
        decided: The arms that were found to differ from the base so far.
    """

    def __init__(self, pairs: list[Paired], units: list[int], margins: list[float], intervals: bool = True) -> None:
        self.pairs, self.units, self.margins, self.intervals = pairs, units, margins, intervals
        self.size = max((_rms(arm.differences) for arm in pairs if arm.seeds), default=0.0)
        self._kept: dict[tuple[int, ...], _Flipped] = {}
        self._others: dict[tuple[int, ...], dict[int, Array]] = {}
        self._of_shifts: tuple[tuple[int, bytes], dict[tuple[int, ...], tuple[Array, Array]]] = (0, b""), {}
        self._of_arm: dict[tuple[int, ...], tuple[Array, Array]] = {}
        self.stopped: dict[int, int] = {}
        self.decided: set[int] = set()

    def stop(self, j: int, seeds: int) -> None:
        """Notes that arm j gets no further seeds."""
        self.stopped[j] = seeds
        self._forget()

    def _forget(self) -> None:
        """Drops what was computed with the arms that were decided and stopped until now."""
        self._kept.clear()
        self._others.clear()
        self._of_shifts = (0, b""), {}

    def tested(self, running: list[int], looks: Sequence[Look]) -> dict[int, Difference]:
        """Steps down through the arms that run, and returns the difference of each."""
        while left := [j for j in running if j not in self.decided]:
            p = {j: float(self.p(j, np.zeros(1), looks)[0]) for j in left}
            if min(p.values()) > ALPHA:
                break
            # Among arms with equal p, those with the largest T go first, together: the order of arms must not matter.
            t = {j: self._observed(j, looks) for j in left if p[j] == min(p.values())}
            self.decided |= {j for j in t if t[j] >= max(t.values()) * _EQUAL}
            self._forget()
        return {j: self._difference(j, looks) for j in running}

    def _difference(self, j: int, looks: Sequence[Look]) -> Difference:
        """The difference of arm j. Its interval is the hull of all values that the test does not reject."""
        d = self.pairs[j].head(looks[-1].seeds).differences
        mean, p = float(d.mean()), float(self.p(j, np.zeros(1), looks)[0])
        margin, is_equal = self.margins[j], self._is_equal(j, mean, looks)
        if smallest_p(len(d)) > looks[-1].spent or (p > ALPHA and not self.intervals):
            return Difference(mean, -math.inf, math.inf, p, len(d), margin, is_equal)
        spread = max(float(d.std()), self._scale(j, len(d)))
        if spread < _DUST * self.size:  # The seeds of a decided arm agree, so that only rounding is left.
            spread = self.size
        bounds = []
        for side in (-1.0, 1.0):
            # The values include 0, so that p and the interval agree.
            away = np.array(sorted({abs(mean), *(spread * 2.0 ** np.arange(-6, 12))})) if spread else np.zeros(1)
            near, far = 0.0, math.inf
            for _ in range(4):
                ps = self.p(j, mean + side * away, looks)
                accepted = np.flatnonzero(ps > ALPHA)
                if mean * side < 0 < len(accepted) and away[accepted[-1]] >= abs(mean):
                    p = max(p, float(ps[away >= abs(mean)].max()))
                last = int(accepted[-1]) if len(accepted) else -1
                near = float(away[last]) if last >= 0 else near
                if last + 1 == len(away):
                    break
                far = float(away[last + 1])
                away = np.linspace(near, far, 12)
            bounds.append(mean + side * (near if far < math.inf or not spread else math.inf))
        return Difference(mean, bounds[0], bounds[1], p, len(d), margin, is_equal)

    def _is_equal(self, j: int, mean: float, looks: Sequence[Look]) -> bool:
        """Whether the difference of arm j is smaller than its margin, by two one-sided tests."""
        margin, twice = self.margins[j], [Look(look.seeds, 2 * look.spent) for look in looks]
        if abs(mean) >= margin or smallest_p(looks[-1].seeds) > twice[-1].spent:
            return False
        return bool((self.p(j, np.array([-margin, margin]), twice) <= ALPHA).all())

    def _scale(self, j: int, seeds: int) -> float:
        """The median size of the differences of all arms in arm j's unit."""
        same = [i for i, unit in enumerate(self.units) if unit == self.units[j]]
        return float(np.median([_rms(self._seen(i, np.ones((1, seeds)))) for i in same]))

    def _seen(self, i: int, signs: Array) -> Array:
        """The differences [E, n] of arm i under every flip: around their mean if decided, repeated if it stopped."""
        n = min(signs.shape[1], self.stopped.get(i, signs.shape[1]))
        if n == signs.shape[1] and i not in self.decided:
            return self._exchanged(i, signs)
        centred = None
        if i in self.decided and n > 1:
            d = self.pairs[i].head(n).differences
            centred = (d - d.mean()) * math.sqrt(n / (n - 1))
        parts = []
        for at in range(0, signs.shape[1], n):
            own = signs[:, at : at + n]
            own = np.hstack([own, signs[:, own.shape[1] : n]])  # The last repeat may lack seeds.
            parts.append(self._exchanged(i, own) if centred is None else centred * own)
        return np.hstack(parts)[:, : signs.shape[1]]

    def _exchanged(self, i: int, signs: Array) -> Array:
        """The differences [E, n] of arm i under every flip. They are kept: many shifts ask for them."""
        kept = self._of_arm.get((i, *signs.shape))
        if kept is None or not np.array_equal(kept[0], signs):
            kept = self._of_arm[i, *signs.shape] = (signs, self.pairs[i].head(signs.shape[1]).exchanged(signs))
        return kept[1]

    def p(self, j: int, shifts: Array, looks: Sequence[Look]) -> Array:
        """Returns, for each of shifts [D], the p-value of "the difference of arm j is the shift"."""
        signs = flips(looks[-1].seeds)
        gone = np.zeros((len(shifts), len(signs)), dtype=bool)
        for look in looks[:-1]:
            largest, _ = self._largest(j, shifts, signs[:, : look.seeds])
            # Count the flips with the largest statistics as decided, as many as this look may decide.
            most = math.floor(look.spent * len(signs) * (1 + 1e-9)) - gone.sum(1)
            left = -np.sort(-np.where(gone, -1.0, largest), axis=1)
            bound = np.take_along_axis(left, np.clip(most, 0, len(signs) - 1)[:, None], axis=1)
            gone |= largest * _EQUAL > bound
        largest, of_j = self._largest(j, shifts, signs)
        p: Array = (gone | (largest >= of_j[:, :1] * _EQUAL)).mean(1)
        return np.minimum(p * ALPHA / looks[-1].spent, 1.0)

    def _observed(self, j: int, looks: Sequence[Look]) -> float:
        """The observed T of arm j at the last look, without a flip."""
        return float(self._largest(j, np.zeros(1), flips(looks[-1].seeds))[1][0, 0])

    def _largest(self, j: int, shifts: Array, signs: Array) -> tuple[Array, Array]:
        """The largest T of the family and the T of arm j, each [D, E]. Later looks ask for those of the same shifts."""
        key = j, shifts.tobytes()
        if key != self._of_shifts[0]:
            self._of_shifts = key, {}
        known = self._of_shifts[1]
        if signs.shape not in known:
            known[signs.shape] = self._compared(j, shifts, signs)
        return known[signs.shape]

    def _compared(self, j: int, shifts: Array, signs: Array) -> tuple[Array, Array]:
        of_j = _Flipped.shifted(self._exchanged(j, signs), shifts, signs)
        family = self._flipped(signs)
        others = [i for i, unit in enumerate(self.units) if unit == self.units[j] and i != j]
        sizes = np.broadcast_to(family.size[others][:, None], (len(others), len(shifts)))
        constant = np.median(np.vstack([sizes, of_j.size]), axis=0) / math.sqrt(2)
        t = of_j.t(constant[:, None])
        largest = np.maximum(self._elsewhere(signs)[self.units[j]], t)
        if others:
            largest = np.maximum(largest, family.t(constant[:, None, None], others).max(axis=1))
        return largest, t

    def _elsewhere(self, signs: Array) -> dict[int, Array]:
        """For each unit, the largest T [1, E] of the arms of all other units, cached as those of `_flipped` are."""
        if signs.shape not in self._others:
            family = self._flipped(signs)
            largest = {}
            for unit in dict.fromkeys(self.units):
                arms = [i for i, of in enumerate(self.units) if of == unit]
                constant = np.median(family.size[arms]) / math.sqrt(2)
                largest[unit] = family.t(np.full((1, 1), constant), arms).max(axis=0, keepdims=True)
            none = np.zeros((1, len(signs)))
            self._others[signs.shape] = {
                unit: np.max([none, *(t for of, t in largest.items() if of != unit)], axis=0) for unit in largest
            }
        return self._others[signs.shape]

    def _flipped(self, signs: Array) -> "_Flipped":
        """The differences of all arms under every flip, cached until an arm is decided or stops."""
        if signs.shape not in self._kept:
            self._kept[signs.shape] = _Flipped.of(np.array([self._seen(i, signs) for i in range(len(self.pairs))]))
        return self._kept[signs.shape]


def _rms(d: Array) -> float:
    """The root of the mean square."""
    return math.sqrt(float(np.mean(d**2)))


class _Flipped:
    """Rows of differences under E flips.

    Attributes:
        n: The number of seeds.
        size: The root of the mean square of each row, on average over the flips, [R].
        mean: The absolute mean of each row under each flip, [R, E].
        sd: The standard deviation of each row under each flip, [R, E].
    """

    def __init__(self, n: int, means: Array, squares: Array) -> None:
        """Takes the means and the mean squares of the rows under each flip, [R, E]."""
        self.n, self.mean, self.size = n, np.abs(means), np.sqrt(squares).mean(1)
        spread = squares - self.mean**2
        self.sd = np.sqrt(np.where(spread > _DUST * squares, spread, 0.0) * n / max(n - 1, 1))

    @classmethod
    def of(cls, d: Array) -> "_Flipped":
        """Takes the differences of each row under each flip, [R, E, n]."""
        return cls(d.shape[2], d.mean(2), np.einsum("ren,ren->re", d, d) / d.shape[2])

    @classmethod
    def shifted(cls, d: Array, shifts: Array, signs: Array) -> "_Flipped":
        """Takes the differences d [E, n] of one arm, and makes a row for each of shifts [R]: d minus shift x signs."""
        n, centre = d.shape[1], d[0].mean()
        d = d - centre * signs  # The shifts are near the mean, where squares of what is left lose no digits.
        by = (shifts - centre)[:, None]
        squares = np.einsum("en,en->e", d, d) - 2 * by * np.einsum("en,en->e", d, signs) + n * by**2
        return cls(n, (d.sum(1) - by * signs.sum(1)) / n, np.maximum(squares, 0.0) / n)

    def t(self, constant: Array, rows: Sequence[int] | slice = slice(None)) -> Array:
        """Returns T of rows for each constant c: [R, E] for c [R, 1], and [D, R, E] for c [D, 1, 1].

        T is 0 if d is 0, and infinite if all seeds agree on a value other than 0 and the constant is 0.
        """
        size = self.sd[rows] + constant
        mean = np.broadcast_to(self.mean[rows], size.shape)
        t: Array = math.sqrt(self.n) * np.divide(mean, size, out=np.where(mean > 0, math.inf, 0.0), where=size > 0)
        return t
