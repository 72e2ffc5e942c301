"""Computes the result of a seed: the mean of its runs' test scores, weighted by the arm's other seeds.

Every seed trains every candidate, and `cross_fitting` says how they are weighed. So the tested differences include the
noise of tuning, and no arm gains by runs that vary more. A run that did not finish counts as the worst outcome of its
seed: the worst score of all arms, or chance if chance is worse.

A candidate whose trial failed in one arm counts in no arm: an arm that lost a candidate would choose among fewer than
the others. If all candidates of an arm failed, the arm has only the seeds that it trained before.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations
from random import Random

import numpy as np
from numpy.typing import NDArray

from deltalab.statistics.cross_fitting import Sample
from deltalab.statistics.joint_test import UNKNOWN, Look, Outcome, follow
from deltalab.statistics.pairs import Pairs
from deltalab.statistics.unbalanced import Groups, compare_groups

SUBSETS = 64
"""How many subsets of candidates the expected result of a smaller budget is the mean of, at most."""


@dataclass(frozen=True)
class Run:
    """The scores of a run at its last step; NaN if the run did not finish."""

    validation: float
    test: float


Runs = Mapping[int, Mapping[int, Run]]
"""Candidate number -> seed -> run."""


@dataclass(frozen=True)
class Scores:
    """The runs of all arms on one task.

    Attributes:
        base: The name of the base, or of the arm that the others are compared with in its place.
        maximize: Whether more of the metric is better.
        chance: The metric of a model that has learned nothing.
        runs: The recorded runs of each arm; a run that failed may be absent.
        seeds: The seeds that each arm was to train, in order.
        failed: The candidates whose trials failed, by arm; an arm without failures may be absent.
        margin: The least difference of the metric that matters.
        block: The seeds of an arm, if the base of the study has more; None if all have the same seeds. So many seeds
            weigh for one another, those of the base too.
        results: Arm -> seed -> the weighted mean of its runs' test scores.
    """

    base: str
    maximize: bool
    chance: float
    runs: Mapping[str, Runs]
    seeds: Mapping[str, Sequence[int]]
    failed: Mapping[str, Collection[int]] = field(default_factory=dict)
    margin: float = 0.0
    block: int | None = None
    results: dict[str, dict[int, float]] = field(init=False)
    _worst: dict[tuple[str, int], float] = field(init=False, repr=False, default_factory=dict)
    _read: dict[tuple[str, int], NDArray[np.float64]] = field(init=False, repr=False, default_factory=dict)
    _kept_weights: dict[str, NDArray[np.float64]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Computes the results."""
        results: dict[str, dict[int, float]] = {}
        for arm in self.seeds:
            seeds = self.trained(arm)
            of_arm = self.sample(arm, seeds).results().tolist() if seeds else []
            results[arm] = dict(zip(seeds, of_arm, strict=True))
        object.__setattr__(self, "results", results)

    @cached_property
    def lost(self) -> dict[int, list[str]]:
        """The candidates that count in no arm, each with the arms in which its trial failed."""
        lost: dict[int, list[str]] = {}
        for arm, numbers in self.failed.items():
            if not self._only_failed(arm):  # Such an arm takes no candidates along.
                for number in numbers:
                    lost.setdefault(number, []).append(arm)
        return lost

    def numbers(self, arm: str) -> list[int]:
        """Returns the candidates of an arm that count."""
        if self._only_failed(arm):
            return [number for number, runs in self.runs[arm].items() if runs]
        return [number for number in self.runs[arm] if number not in self.lost]

    def trained(self, arm: str) -> list[int]:
        """Returns the seeds of an arm that count, in order; none if no candidate counts."""
        runs = [self.runs[arm][number] for number in self.numbers(arm)]
        if self._only_failed(arm):
            return [seed for seed in self.seeds[arm] if runs and all(seed in run for run in runs)]
        return [*self.seeds[arm]] if runs else []

    def _only_failed(self, arm: str) -> bool:
        failed = self.failed.get(arm, ())
        return bool(failed) and all(number in failed for number in self.runs[arm])

    def sample(self, arm: str, seeds: Sequence[int]) -> Sample:
        """Returns an arm's runs of some seeds. Runs that did not finish have the worst scores of their seed."""
        for seed in seeds:
            if (arm, seed) not in self._read:
                self._read[arm, seed] = self._scores_of(arm, seed)
        scores = np.array([self._read[arm, seed] for seed in seeds]).reshape(len(seeds), 2, len(self.numbers(arm)))
        return Sample(scores[:, 0], scores[:, 1], self.maximize, self.block)

    def _scores_of(self, arm: str, seed: int) -> NDArray[np.float64]:
        """The scores of an arm's candidates with a seed on validation and on test, [2, C]."""
        runs = [self._finished(arm, number, seed) for number in self.numbers(arm)]
        validation = [run.validation if run else self.worst(seed, "validation") for run in runs]
        return np.array([validation, [run.test if run else self.worst(seed) for run in runs]])

    def _finished(self, arm: str, number: int, seed: int) -> Run | None:
        """A run; None if it did not finish."""
        run = self.runs[arm][number].get(seed)
        return run if run and math.isfinite(run.validation) and math.isfinite(run.test) else None

    def weighed(self, arm: str, figures: Mapping[int, Mapping[int, float]]) -> list[float]:
        """Returns the mean of another figure of a seed's runs for each seed of an arm, weighted as its result is.

        Runs without the figure are left out. A seed whose runs of any weight all lack it has NaN.

        Args:
            arm: The name of the arm.
            figures: Candidate number -> seed -> figure.
        """
        seeds, numbers = self.trained(arm), self.numbers(arm)
        if not seeds:
            return []
        values = np.array([[figures.get(number, {}).get(seed, math.nan) for number in numbers] for seed in seeds])
        known = np.isfinite(values)
        weights = np.where(known, self._weights(arm), 0.0)
        total = weights.sum(1)
        sums = (weights * np.where(known, values, 0.0)).sum(1)
        means: list[float] = np.divide(sums, total, out=np.full(len(seeds), math.nan), where=total > 0).tolist()
        return means

    def choice(self, arm: str, seed: int) -> int | None:
        """Returns the candidate with the greatest weight for a seed; None if the seed's run of it did not finish."""
        seeds, numbers = self.trained(arm), self.numbers(arm)
        if seed not in seeds:
            return None
        number = numbers[self._weights(arm)[seeds.index(seed)].argmax()]
        return number if self._finished(arm, number, seed) else None

    def _weights(self, arm: str) -> NDArray[np.float64]:
        """The weights of an arm's candidates, by seed and candidate: [n, C]."""
        if arm not in self._kept_weights:
            self._kept_weights[arm] = self.sample(arm, self.trained(arm)).weights()
        return self._kept_weights[arm]

    def worst(self, seed: int, split: str = "test") -> float:
        """Returns the worst outcome of a seed: the worst score of all arms, or chance if chance is worse.

        If the base has seeds of its own, the worst score with any seed counts: a seed of the base alone must not do
        better for that.
        """
        if (split, seed) not in self._worst:
            by_seed = [run for runs in self.runs.values() for run in runs.values()]
            seeds = [seed] if self.block is None else {other for run in by_seed for other in run}
            runs = [run[other] for run in by_seed for other in seeds if other in run]
            worst, scores = min if self.maximize else max, [getattr(run, split) for run in runs]
            self._worst[split, seed] = worst([self.chance, *filter(math.isfinite, scores)])
        return self._worst[split, seed]

    @property
    def others(self) -> list[str]:
        """The arms, other than the base, that have a result, if the base has one."""
        return [arm for arm in self.results if arm != self.base and self.results[arm] and self.results[self.base]]

    def pairs(self, arm: str, base: str | None = None) -> Pairs:
        """Returns the runs of an arm and of the base, or of another arm in its place, on the seeds of both."""
        base = base or self.base
        seeds = self.shared_seeds(arm, base)
        of_arm, of_base = self.sample(arm, seeds), self.sample(base, seeds)
        candidates = max(of_arm.candidates, of_base.candidates)
        return Pairs(of_arm.widened(candidates), of_base.widened(candidates))

    def groups(self, arm: str) -> Groups:
        """Returns the runs of an arm and of the base, each on all of its seeds."""
        of_arm, of_base = (self.sample(name, self.trained(name)) for name in (arm, self.base))
        candidates = max(of_arm.candidates, of_base.candidates)
        return Groups(of_arm.widened(candidates), of_base.widened(candidates))

    def shared_seeds(self, arm: str, base: str | None = None) -> list[int]:
        """Returns the seeds that an arm shares with `base`, or with the base of the study if that is None."""
        return [seed for seed in self.results[arm] if seed in self.results[base or self.base]]

    def differences(self, arm: str) -> list[float]:
        """Returns the arm's results minus the base's, in the order of seeds. A difference by rounding alone is 0."""
        return list(self.by_seed(arm).values())

    def by_seed(self, arm: str, first: int | None = None) -> dict[int, float]:
        """Returns the arm's results minus the base's, by seed. A difference by rounding alone is 0.

        Both choose by the seeds that they share, and not by further seeds of one of them.

        Args:
            arm: The name of the arm.
            first: How many of the shared seeds to take; None takes all.
        """
        seeds = self.shared_seeds(arm)[:first]
        return dict(zip(seeds, self.pairs(arm).head(len(seeds)).differences.tolist(), strict=True))

    def best(self, arm: str) -> int | None:
        """Returns the candidate with the best mean validation score; None if no candidate finished all seeds."""
        means, seeds = {}, self.trained(arm)
        for number in self.numbers(arm):
            runs = [self.runs[arm][number].get(seed) for seed in seeds]
            finished = [run.validation for run in runs if run and math.isfinite(run.validation)]
            if finished and len(finished) == len(runs):
                means[number] = math.fsum(finished) / len(finished)
        best = max if self.maximize else min
        return best(means, key=lambda number: means[number]) if means else None

    def shown(self, arm: str) -> int | None:
        """Returns the candidate to show for an arm: the best or, if there is none, that of a seed."""
        best = self.best(arm)
        if best is not None:
            return best
        choices = (self.choice(arm, seed) for seed in self.results.get(arm, {}))
        return next((number for number in choices if number is not None), None)

    def one_setting(self, arm: str) -> list[float]:
        """Returns the test scores of the best candidate with each seed; [] if no candidate finished all seeds.

        Their mean is that of a single setting, which was chosen by the validation scores of the very seeds.
        """
        best = self.best(arm)
        return [] if best is None else [self.runs[arm][best][seed].test for seed in self.trained(arm)]

    def by_budget(self, arm: str) -> dict[int, float]:
        """Returns the expected result by how many of the candidates had been tried, for each of `budgets`.

        It is the mean over subsets of the candidates: over all of a size, or over `SUBSETS` of them drawn by lot.

        References:
            Dodge et al. 2019, arXiv:1909.03004.
        """
        sample = self.sample(arm, self.trained(arm))
        if not sample.seeds:
            return dict.fromkeys(budgets(sample.candidates), math.nan)
        subsets = _subsets(sample.candidates)
        return {size: float(sample.among(some).results().mean()) for size, some in subsets.items()}


def budgets(candidates: int) -> list[int]:
    """Returns the smaller budgets that are looked at: each up to 8 candidates, then the doubles of 8, and all.

    Examples:
        >>> budgets(20)
        [1, 2, 3, 4, 5, 6, 7, 8, 16, 20]
    """
    sizes = [*range(1, min(candidates, 8) + 1)]
    while sizes[-1] < candidates:
        sizes.append(min(2 * sizes[-1], candidates))
    return sizes


@lru_cache(maxsize=8)
def _subsets(candidates: int) -> dict[int, NDArray[np.intp]]:
    """The subsets of candidates by their size, [subsets, size]: all of a size, or `SUBSETS` of them drawn by lot.

    Arms of as many candidates share them, since drawing takes as long as weighing.
    """
    draw, columns = Random(0), range(candidates)
    return {
        size: np.array(
            list(combinations(columns, size))
            if math.comb(candidates, size) <= SUBSETS
            else [draw.sample(columns, size) for _ in range(SUBSETS)]
        )
        for size in budgets(candidates)
    }


def outcomes(
    tables: Sequence[Scores], looks: Sequence[Look], *, intervals: bool = True, afterwards: bool = False
) -> list[dict[str, Outcome]]:
    """Tests all arms of several tasks as one family.

    If the base has more seeds than the arms, they are compared as groups, once; afterwards, with another reference than
    the base, in pairs like those of any study.

    Args:
        tables: The scores on each task.
        looks: The looks of the study.
        intervals: As in `joint_test.follow`.
        afterwards: As in `joint_test.follow`. Arms with too few seeds for the first look are not tested.

    Returns:
        For each task, the outcome of each arm but the base.
    """
    by_task: list[dict[str, Outcome]] = [{arm: Outcome(UNKNOWN, None) for arm in table.others} for table in tables]
    arms = [(unit, arm) for unit, table in enumerate(tables) for arm in table.others]
    if afterwards:
        arms = [(unit, arm) for unit, arm in arms if len(tables[unit].shared_seeds(arm)) >= looks[0].seeds]
    units, margins = [unit for unit, _ in arms], [tables[unit].margin for unit, _ in arms]
    if any(table.block is not None for table in tables) and not afterwards:
        compared = compare_groups([tables[unit].groups(arm) for unit, arm in arms], units, margins)
        followed = [Outcome(difference, "last") for difference in compared]
    else:
        pairs = [tables[unit].pairs(arm) for unit, arm in arms]
        followed = follow(pairs, looks, units, margins=margins, intervals=intervals, afterwards=afterwards)
    for (unit, arm), outcome in zip(arms, followed, strict=True):
        by_task[unit][arm] = outcome
    return by_task
