"""Remembers which documents were there before, in 8 bytes each."""

import numpy as np
from numpy.typing import NDArray


class Seen:
    """A set of 64-bit keys: sorted arrays, merged whenever a later one is at least half as long as the one before it.

    n keys take 8 n bytes, twice as much while they are merged. Among a billion random keys, two are equal with a
    probability of 3%.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def new(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Adds the keys; says of each whether it is the first of its value, here and in all earlier calls."""
        values, first = np.unique(keys, return_index=True)
        known = np.zeros(len(values), bool)
        for run in self._runs:
            place = np.searchsorted(run, values)
            known |= run[np.minimum(place, len(run) - 1)] == values
        fresh = np.zeros(len(keys), bool)
        fresh[first[~known]] = True
        if not known.all():
            self._runs.append(values[~known])
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]))]
        return fresh
