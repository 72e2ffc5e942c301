"""Computes the result of a seed: the test score of the run with the best validation score among the candidates.

Each seed trains every candidate and chooses for itself. So an arm's seeds are independent repeats of the whole
procedure, tuning included, and the tested differences include the noise of the choice. A seed without a finished
run counts as the worst outcome of that seed: the worst score of all arms, or chance if chance is worse.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import mul

from deltalab.study.statistics.joint_test import Look, Outcome, follow


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
        base: The name of the base.
        maximize: Whether more of the metric is better.
        chance: The metric of a model that has learned nothing.
        runs: The recorded runs of each arm; a run that failed may be absent.
        seeds: The seeds that each arm was to train, in order.
        results: Arm -> seed -> the test score of the chosen run, or the worst outcome if no run finished.
    """

    base: str
    maximize: bool
    chance: float
    runs: Mapping[str, Runs]
    seeds: Mapping[str, Sequence[int]]
    results: dict[str, dict[int, float]] = field(init=False)
    _worst: dict[int, float] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Computes the results."""
        choices = {arm: {seed: self.choice(arm, seed) for seed in seeds} for arm, seeds in self.seeds.items()}
        results: dict[str, dict[int, float]] = {arm: {} for arm in choices}
        for arm, by_seed in choices.items():
            for seed, number in by_seed.items():
                results[arm][seed] = self.worst(seed) if number is None else self.runs[arm][number][seed].test
        object.__setattr__(self, "results", results)

    def choice(self, arm: str, seed: int) -> int | None:
        """Returns the number of the candidate that a seed chose; None if no run of the seed finished."""
        return chosen_candidate(self.runs[arm], seed, self.maximize)

    def worst(self, seed: int) -> float:
        """Returns the worst outcome of a seed: the worst score of all arms, or chance if chance is worse."""
        if seed not in self._worst:
            tests = [run[seed].test for runs in self.runs.values() for run in runs.values() if seed in run]
            worst = min if self.maximize else max
            self._worst[seed] = worst([self.chance, *(test for test in tests if math.isfinite(test))])
        return self._worst[seed]

    @property
    def others(self) -> list[str]:
        """The arms, other than the base, that have a result."""
        return [arm for arm in self.results if arm != self.base and self.seeds[arm]]

    def differences(self, arm: str) -> list[float]:
        """Returns the arm's results minus the base's, in the order of seeds. A difference by rounding alone is 0."""
        return list(self.by_seed(arm).values())

    def by_seed(self, arm: str) -> dict[int, float]:
        """Returns the arm's results minus the base's, by seed. A difference by rounding alone is 0."""
        pairs = {seed: (self.results[arm][seed], self.results[self.base].get(seed)) for seed in self.seeds[arm]}
        return {
            seed: 0.0 if abs(result - base) <= 1e-12 * max(abs(result), abs(base)) else result - base
            for seed, (result, base) in pairs.items()
            if base is not None
        }

    def best(self, arm: str) -> int | None:
        """Returns the candidate with the best mean validation score; None if no candidate finished all seeds."""
        means = {}
        for number, runs in self.runs[arm].items():
            values = [runs[seed].validation if seed in runs else math.nan for seed in self.seeds[arm]]
            if values and all(map(math.isfinite, values)):
                means[number] = math.fsum(values) / len(values)
        best = max if self.maximize else min
        return best(means, key=lambda number: means[number]) if means else None

    def shown(self, arm: str) -> int | None:
        """Returns the candidate to show for an arm: the best or, if there is none, the first that a seed chose."""
        best = self.best(arm)
        if best is not None:
            return best
        choices = (self.choice(arm, seed) for seed in self.results.get(arm, {}))
        return next((number for number in choices if number is not None), None)

    def by_budget(self, arm: str) -> list[float]:
        """Returns the expected result if only 1, 2, ... of the candidates had been tried.

        Sort the n candidates by a seed's validation scores, the best first. If b of them are drawn without replacement,
        candidate r (from 0) is the best of the draw with probability C(n - 1 - r, b - 1) / C(n, b).

        References:
            Dodge et al. 2019, arXiv:1909.03004.
        """
        numbers, expected = list(self.runs[arm]), []
        ranked = []
        for seed in self.seeds[arm]:
            order = sorted(numbers, key=lambda number: self._rank(arm, number, seed))
            ranked.append([self._test(arm, number, seed) for number in order])
        for chance in _chances(len(numbers)):
            sums = [math.fsum(map(mul, chance, tests)) for tests in ranked]
            expected.append(math.fsum(sums) / len(sums) if sums else math.nan)
        return expected

    def _rank(self, arm: str, number: int, seed: int) -> tuple[bool, float]:
        """The key that sorts an arm's candidates by a seed's validation scores, the best first."""
        run = self.runs[arm][number].get(seed)
        if run is None or not (math.isfinite(run.validation) and math.isfinite(run.test)):
            return True, 0.0
        return False, -run.validation if self.maximize else run.validation

    def _test(self, arm: str, number: int, seed: int) -> float:
        """The test score of a run, or the worst outcome of its seed if the run did not finish."""
        run = self.runs[arm][number].get(seed)
        return run.test if run is not None and math.isfinite(run.test) else self.worst(seed)


@cache
def _chances(total: int) -> list[list[float]]:
    """For b = 1, 2, ... `total` candidates drawn, the probability that number r = 0, 1, ... is the best of them."""
    return [
        [math.comb(total - 1 - r, budget - 1) / math.comb(total, budget) for r in range(total)]
        for budget in range(1, total + 1)
    ]


def chosen_candidate(runs: Runs, seed: int, maximize: bool) -> int | None:
    """Returns the candidate with a seed's best validation score, the first of equals; None if no run finished.

    Examples:
        >>> runs = {0: {1: Run(0.5, 0.4)}, 1: {1: Run(0.7, 0.3)}, 2: {1: Run(math.nan, 0.9)}}
        >>> chosen_candidate(runs, seed=1, maximize=True)
        1
    """
    scores = {
        number: run[seed].validation
        for number, run in runs.items()
        if seed in run and math.isfinite(run[seed].validation) and math.isfinite(run[seed].test)
    }
    best = max if maximize else min
    return best(scores, key=lambda number: scores[number]) if scores else None


def outcomes(tables: Sequence[Scores], looks: Sequence[Look], *, intervals: bool = True) -> list[dict[str, Outcome]]:
    """Tests all arms of several tasks as one family.

    Args:
        tables: The scores on each task.
        looks: The looks of the study.
        intervals: As in `joint_test.follow`.

    Returns:
        For each task, the outcome of each arm but the base.
    """
    arms = [(unit, arm) for unit, table in enumerate(tables) for arm in table.others]
    differences = [tables[unit].differences(arm) for unit, arm in arms]
    by_task: list[dict[str, Outcome]] = [{} for _ in tables]
    followed = follow(differences, looks, [unit for unit, _ in arms], intervals=intervals)
    for (unit, arm), outcome in zip(arms, followed, strict=True):
        by_task[unit][arm] = outcome
    return by_task
