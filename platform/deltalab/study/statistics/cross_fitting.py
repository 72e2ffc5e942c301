"""Chooses each seed's candidate by the validation scores of other seeds, so that no seed is rewarded for its own luck.

The best of several runs is better than the setting that it was trained with: an arm whose runs vary more would gain
from choosing among its own. So the candidate of a seed is the one with the best mean validation score over the other
seeds, and the seed's result is the test score of its own run of that candidate (cross-fitting). Then the expected
result is that of the chosen settings, however much runs vary.

Results of different seeds share what they chose by, so they are no independent numbers. The tests therefore exchange
whole seeds, all their runs, between an arm and the base, and choose anew after every exchange.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """The runs of one arm on n seeds, each of which trained C candidates.

    Attributes:
        validation: The validation scores, [n, C]. With a single candidate they are not used.
        test: The test scores, [n, C].
        maximize: Whether more is better.
    """

    validation: Array
    test: Array
    maximize: bool = True

    @property
    def seeds(self) -> int:
        """The number of seeds, n."""
        return len(self.test)

    @property
    def candidates(self) -> int:
        """The number of candidates, C."""
        return int(self.test.shape[-1])

    def head(self, seeds: int) -> "Sample":
        """Returns the runs of the first seeds."""
        return replace(self, validation=self.validation[:seeds], test=self.test[:seeds])

    def shifted(self, by: float) -> "Sample":
        """Returns the runs with a number added to every score."""
        return replace(self, validation=self.validation + by, test=self.test + by)

    def widened(self, candidates: int) -> "Sample":
        """Returns the runs with the candidates repeated until there are as many as given.

        An arm without tuning has one candidate, whatever its seeds choose.
        """
        columns = np.arange(max(candidates, self.candidates)) % self.candidates
        return replace(self, validation=self.validation[:, columns], test=self.test[:, columns])

    def exchanged(self, other: "Sample", kept: NDArray[np.bool_]) -> "Sample":
        """Returns this arm's runs of the seeds that are kept, [..., n], and the other arm's of the rest."""
        own = kept[..., None]
        validation = np.where(own, self.validation, other.validation)
        return replace(self, validation=validation, test=np.where(own, self.test, other.test))

    def results(self) -> Array:
        """Returns each seed's test score of its run of the candidate that the other seeds prefer, [..., n].

        Examples:
            >>> validation = np.array([[0.9, 0.1], [0.2, 0.8], [0.3, 0.4]])
            >>> Sample(validation, np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).results()
            array([2., 3., 5.])
        """
        if self.candidates == 1:
            return self.test[..., 0]
        results: Array = np.take_along_axis(self.test, self.choices()[..., None], axis=-1)[..., 0]
        return results

    def choices(self) -> NDArray[np.intp]:
        """Returns the number of the candidate that each seed takes, [..., n]: the first of equal means."""
        choices: NDArray[np.intp] = self._preferences().argmax(-1)
        return choices

    def ranked(self) -> Array:
        """Returns each seed's test scores, [n, C], in the order in which the other seeds prefer the candidates."""
        order = np.argsort(-self._preferences(), axis=-1, kind="stable")
        ranked: Array = np.take_along_axis(self.test, order, axis=-1)
        return ranked

    def _preferences(self) -> Array:
        """The sums of the validation scores of a seed's others, [..., n, C]; more is better.

        A single seed has no other, and chooses by its own.
        """
        preferences = self.validation if self.maximize else -self.validation
        if preferences.shape[-2] < 2:
            return preferences
        # Add what is before a seed and what is after it: the sum of all, minus its own, would break ties by rounding.
        others = np.zeros_like(preferences)
        others[..., 1:, :] += preferences[..., :-1, :].cumsum(-2)
        others[..., :-1, :] += preferences[..., :0:-1, :].cumsum(-2)[..., ::-1, :]
        return others
