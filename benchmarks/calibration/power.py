"""The power of the joint test with several constants c of its statistic."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from calibration.many_studies import CONSTANTS, EFFECT, Array, Bench, differences, follow, normal
from calibration.tuning_designs import separate_tests

from deltalab.statistics.joint_test import one_look

SETTINGS = {
    "equal variances": 9,
    "one arm with 10 times the sd": 9,
    "two arms collapse on a fifth of the seeds": 9,
    "equal variances, 7 seeds": 7,
}


def setting(random: np.random.Generator, name: str, repeats: int, effect: float) -> Array:
    """Draws scores with an effect on arm 1, and with a spread of the last arms that the name describes."""
    scores = normal(random, repeats, SETTINGS[name])
    scores[:, 1] += effect
    if name.startswith("one arm"):
        scores[:, -1] *= 10
    if name.startswith("two arms"):
        scores[:, -2:] -= 20 * (random.random(scores[:, -2:].shape) < 0.2)
    return scores


def powers(bench: Bench) -> Iterator[dict[str, Any]]:
    """Measures the power of the test with each constant, in each setting."""
    for name, seeds in SETTINGS.items():
        d = differences(setting(bench.random, name, bench.repeats, EFFECT))
        bench.single(d)
        yield {"setting": name, "constant": "separate tests", "power": float(separate_tests(d)[0][:, 0].mean())}
        for constant in CONSTANTS:
            told = follow(d, one_look(seeds), CONSTANTS[constant])[0]
            yield {"setting": name, "constant": constant, "power": float(told[:, 0].mean())}
