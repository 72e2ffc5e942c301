"""Compares arms over several tasks at once: by the mean of normalized scores, and by their interquartile mean.

A score is normalized so that chance is 0 and the best possible value is 1. With x_jsk the normalized result of arm j
with seed s on task k of K, and arm 0 the base, the mean over tasks is a difference for each seed,

    d_js = sum_k (x_jsk - x_0sk) / K

The interquartile mean (IQM) takes all n K results of an arm together (`interquartile`). `joint_test` exchanges whole
seeds, the runs of all tasks at once, and tests the arms together: first by their means, then apart by their IQMs. Both
tests are exact, since the two numbers that normalize a task do not depend on any result.

Every arm must have its n seeds whatever its results. If seeds are added in looks, these are the seeds of the first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deltalab.statistics.joint_test import Difference, follow, one_look
from deltalab.statistics.pairs import Contrast, InterquartileContrast
from deltalab.statistics.seed_choice import Scores


@dataclass(frozen=True)
class OverTasks:
    """The runs of all arms on several tasks.

    Attributes:
        scores: The scores on each task.
        perfect: The best possible score on each task.
        seeds: The number of seeds that count, n: the first of each arm.
    """

    scores: Sequence[Scores]
    perfect: Sequence[float]
    seeds: int

    @property
    def arms(self) -> list[str]:
        """The arms, the base among them, that have all seeds on all tasks."""
        return [
            arm
            for arm in self.scores[0].results
            if all(len(of_task.results.get(arm, ())) >= self.seeds for of_task in self.scores)
        ]

    @property
    def margin(self) -> float:
        """The least difference of the mean that matters: the mean of those of the tasks, normalized."""
        margins = (
            of_task.margin / abs(perfect - of_task.chance)
            for of_task, perfect in zip(self.scores, self.perfect, strict=True)
        )
        return math.fsum(margins) / len(self.scores)

    def seeds_of(self, arm: str) -> list[int]:
        """Returns the seeds of an arm that count."""
        return self.scores[0].trained(arm)[: self.seeds]

    def results(self, arm: str) -> NDArray[np.float64]:
        """Returns the normalized results of an arm, [n, K]."""
        samples = (
            of_task.sample(arm, of_task.trained(arm)[: self.seeds]).normalized(of_task.chance, perfect)
            for of_task, perfect in zip(self.scores, self.perfect, strict=True)
        )
        return np.stack([sample.results() for sample in samples], axis=-1)

    def differences(self, *, intervals: bool = True) -> dict[str, tuple[Difference, Difference]]:
        """Tests all arms against the base.

        Args:
            intervals: As in `joint_test.follow`.

        Returns:
            The differences in mean and in IQM of each arm but the base; {} if the base lacks seeds.
        """
        base = self.scores[0].base
        arms = [arm for arm in self.arms if arm != base and base in self.arms]
        pairs = [
            tuple(
                of_task.pairs(arm).head(self.seeds).normalized(of_task.chance, perfect)
                for of_task, perfect in zip(self.scores, self.perfect, strict=True)
            )
            for arm in arms
        ]
        weights = (1 / len(self.scores),) * len(self.scores)
        means = follow(
            [Contrast(of_arm, weights) for of_arm in pairs],
            one_look(self.seeds),
            margins=[self.margin] * len(pairs),
            intervals=intervals,
        )
        iqms = follow([InterquartileContrast(of_arm) for of_arm in pairs], one_look(self.seeds), intervals=intervals)
        both = zip((mean.difference for mean in means), (iqm.difference for iqm in iqms), strict=True)
        return dict(zip(arms, both, strict=True))
