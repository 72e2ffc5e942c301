"""Computes the interquartile mean of scores over tasks and seeds, and what each seed adds to it.

The interquartile mean (IQM) leaves out the least and the greatest quarter of all scores, so that no task or run that
stands far apart decides it (Agarwal et al. 2021, arXiv:2108.13264).
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def interquartile_parts(scores: ArrayLike) -> Array:
    """Returns a number for each seed whose mean over the seeds is the IQM of all N = nK scores.

    With g = floor(N / 4), [a, b] from the (g + 1)-th least to the (g + 1)-th greatest score, and w_s the mean over the
    tasks of seed s's scores, cut off at a and b,

        part_s = IQM + N / (N - 2g) (w_s - mean w)

    The parts differ from seed to seed as the IQM would if seeds were exchanged for others (its influence function), so
    that a t interval of the parts is one of the IQM.

    Args:
        scores: The scores [..., n, K] of n seeds on K tasks.

    Returns:
        The parts, [..., n].

    References:
        Tukey and McLaughlin 1963; Yuen 1974, for trimmed means of independent numbers.

    Examples:
        >>> interquartile_parts([[0.0, 0.5], [0.6, 0.7]]).round(3).tolist()
        [0.45, 0.65]
    """
    x = np.asarray(scores, dtype=float)
    flat = np.sort(x.reshape(*x.shape[:-2], -1))
    n = flat.shape[-1]
    cut = n // 4
    middle = flat[..., cut : n - cut]
    inside = np.clip(x, middle[..., :1, None], middle[..., -1:, None]).mean(-1)
    away = inside - inside.mean(-1, keepdims=True)
    parts: Array = middle.mean(-1)[..., None] + n / middle.shape[-1] * away
    return parts
