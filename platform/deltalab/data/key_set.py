"""A set that remembers documents in 8 bytes each."""

import numpy as np
from numpy.typing import NDArray


class KeySet:
    """A set of 64-bit keys, as sorted arrays. A new array is merged with an earlier one of up to twice its length.

    n keys take 8 n bytes, and twice as much during a merge. Among a billion random keys, two are equal with a
    probability of 3%.
    """

    def __init__(self) -> None:
        self._runs: list[NDArray[np.uint64]] = []

    def new(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Returns for each key whether it is new: neither in the set nor earlier in `keys`."""
        values, first = np.unique(keys, return_index=True)
        known = np.zeros(len(values), bool)
        for run in self._runs:
            place = np.searchsorted(run, values)
            known |= run[np.minimum(place, len(run) - 1)] == values
        is_new = np.zeros(len(keys), bool)
        is_new[first[~known]] = True
        return is_new

    def add(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Adds keys, and returns for each key whether it was new."""
        is_new = self.new(keys)
        if is_new.any():
            self._runs.append(np.sort(keys[is_new]))
        while len(self._runs) > 1 and len(self._runs[-2]) <= 2 * len(self._runs[-1]):
            self._runs[-2:] = [np.sort(np.concatenate(self._runs[-2:]))]
        return is_new
