"""Simulates loops of proposals that `deltalab score` judges, and the same loops under other rules.

    python benchmarks/score_loops.py --out benchmarks/score_loops.json       # about 2 minutes of one core

A loop has 200 proposals. The score of a seed has a standard deviation of 1, for the rule and for the base, and the two
have nothing in common, which is the hardest case. `noise` has proposals that compute what the base does. `gains` plants
a gain of 1.5 in every tenth proposal. A climbing loop proposes again and again what was not kept, with most of its
luck on the seeds that it has seen. Each way of judging has these figures:

- false keeps: the share of loops that keep any proposal without a gain.
- found: the share of planted gains that are kept.
- runs: trainings in a loop.

The ways: `staged` is that of deltalab (`deltalab.study.scoring.design`). `every one at 5%` tests each proposal once by
itself on the study's seeds. `lond`, `alpha-investing` and `saffron` test each proposal on as many seeds as `staged`
confirms with, always the same seeds, by the same p.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr

from deltalab.statistics.joint_test import ALPHA
from deltalab.statistics.pairs import Pairs
from deltalab.study.scoring import design

PROPOSALS = 200
EVERY = 10
KEPT_LUCK = 0.9
"""The correlation of a climbing loop's next proposal with the one before, on the same seeds."""
Array = NDArray[np.float64]
Noise = Callable[[np.random.Generator, tuple[int, ...]], Array]

NOISES: dict[str, Noise] = {
    "normal": lambda draw, shape: draw.normal(size=shape),
    "heavy tails (t, 3)": lambda draw, shape: draw.standard_t(3, shape) / 3**0.5,
    "skewed (exponential)": lambda draw, shape: draw.exponential(size=shape) - 1,
}


class Loop:
    """The proposals of one loop: their scores on any seeds, and which have a gain.

    Attributes:
        gains: The gain of each proposal.
        trained: How many runs were asked for.
    """

    def __init__(self, seed: int, noise: Noise, *, planted: bool, climbs: bool = False) -> None:
        self.gains = [design.GAIN if planted and i % EVERY == EVERY // 2 else 0.0 for i in range(PROPOSALS)]
        self.trained = 0
        self._draw, self._noise, self._climbs = np.random.default_rng(seed), noise, climbs
        self._base: dict[int, Array] = {}
        self._last: dict[int, Array] = {}

    def differences(self, proposal: int, block: int, seeds: int) -> Array:
        """Returns rule minus base on a block of seeds. The base of a block is trained once."""
        if block not in self._base:
            self._base[block] = self._noise(self._draw, (seeds,))
            self.trained += seeds
        own = self._noise(self._draw, (seeds,))
        if self._climbs and block in self._last:
            moved = KEPT_LUCK * self._last[block] + (1 - KEPT_LUCK**2) ** 0.5 * own
            own = moved if moved.mean() > self._last[block].mean() else self._last[block]
        self._last[block] = own
        self.trained += seeds
        return self.gains[proposal] + own - self._base[block]


def staged(loop: Loop, seeds: int) -> Iterator[bool]:
    """Judges as `deltalab score` does. Yields whether each proposal is kept."""
    confirmation = 0
    for proposal in range(PROPOSALS):
        if not design.is_promising(loop.differences(proposal, 0, seeds)):
            yield False
            continue
        confirmation += 1
        alpha = design.alpha_of(confirmation)
        fresh = loop.differences(proposal, confirmation, design.seeds_of(confirmation))
        yield design.p_of(Pairs.plain(fresh), 1, alpha) <= alpha


def every_one(loop: Loop, seeds: int) -> Iterator[bool]:
    """Tests each proposal by itself at 5%."""
    for proposal in range(PROPOSALS):
        yield _t_test(loop.differences(proposal, 0, seeds)) <= ALPHA


def lond(loop: Loop, _: int) -> Iterator[bool]:
    """LOND (Javanmard and Montanari 2015): alpha times a series, times one more than the keeps so far."""
    series, kept = _series(), 0
    for proposal in range(PROPOSALS):
        keep = _t_test(loop.differences(proposal, 0, design.seeds_of(1))) <= ALPHA * series[proposal] * (kept + 1)
        kept += keep
        yield keep


def alpha_investing(loop: Loop, _: int) -> Iterator[bool]:
    """Alpha-investing (Foster and Stine 2008): a tenth of the wealth on each test, and ALPHA back for each keep."""
    wealth = ALPHA
    for proposal in range(PROPOSALS):
        level = wealth / 10 / (1 + wealth / 10)
        keep = _t_test(loop.differences(proposal, 0, design.seeds_of(1))) <= level
        wealth += ALPHA if keep else -level / (1 - level)
        yield keep


def saffron(loop: Loop, _: int) -> Iterator[bool]:
    """SAFFRON (Ramdas et al. 2018) with lambda 1/2: only p-values below lambda use up the series."""
    series, half = _series(), 0.5
    keeps: list[int] = []
    candidates: list[int] = []
    for proposal in range(PROPOSALS):
        level = ALPHA / 2 * series[len(candidates)]
        for n, at in enumerate(keeps):
            since = sum(1 for candidate in candidates if candidate > at)
            level += (ALPHA / 2 if n == 0 else ALPHA) * series[since]
        p = _t_test(loop.differences(proposal, 0, design.seeds_of(1)))
        keep = p <= min(half, (1 - half) * level)
        keeps += [proposal] if keep else []
        candidates += [proposal] if p <= half else []
        yield keep


def _series() -> Array:
    """A series that sums to 1, about n^-1.6."""
    terms = np.arange(1, 10**5) ** -1.6
    return np.asarray(terms / terms.sum())


def _t_test(differences: Array) -> float:
    """The one-sided p of Student's test."""
    n = len(differences)
    return float(stdtr(n - 1, -differences.mean() / differences.std(ddof=1) * n**0.5))


WAYS = {
    "staged": staged,
    "every one at 5%": every_one,
    "lond": lond,
    "alpha-investing": alpha_investing,
    "saffron": saffron,
}


def simulate(way: str, seeds: int, loops: int, noise: str, *, planted: bool, climbs: bool = False) -> dict[str, Any]:
    """Returns the figures of a way of judging over many loops."""
    wrong, found, planted_gains, runs = 0, 0, 0, 0
    started = time.process_time()
    for repeat in range(loops):
        loop = Loop(repeat, NOISES[noise], planted=planted, climbs=climbs)
        kept = [*WAYS[way](loop, seeds)]
        wrong += any(keep and not gain for keep, gain in zip(kept, loop.gains, strict=True))
        found += sum(keep and gain > 0 for keep, gain in zip(kept, loop.gains, strict=True))
        planted_gains += sum(gain > 0 for gain in loop.gains)
        runs += loop.trained
    share = wrong / loops
    figures = {
        "false keeps": share,
        "standard error": (share * (1 - share) / loops) ** 0.5,
        **({"found": found / planted_gains} if planted else {}),
        "runs": runs / loops,
        "loops": loops,
    }
    print(way, f"{seeds} seeds", noise, "gains" if planted else "noise", "climbs" * climbs, figures, flush=True)
    print(f"  {time.process_time() - started:.0f} s", flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=400)
    parser.add_argument("--seeds", default="5,7,10", help="the study's seeds")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"proposals": PROPOSALS, "gain": design.GAIN, "planted": PROPOSALS // EVERY}
    for seeds in map(int, options.seeds.split(",")):
        of_seeds = result.setdefault("staged", {}).setdefault(f"{seeds} seeds", {})
        for noise in NOISES if seeds == 7 else ["normal"]:
            of_seeds[noise] = {
                "noise": simulate("staged", seeds, options.loops, noise, planted=False),
                "gains": simulate("staged", seeds, options.loops // 4, noise, planted=True),
            }
    climbing = simulate("staged", 7, options.loops, "normal", planted=False, climbs=True)
    result["staged"].setdefault("7 seeds", {})["a climbing loop"] = {"noise": climbing}
    for way in WAYS:
        if way != "staged":
            result[way] = {
                "noise": simulate(way, 7, options.loops, "normal", planted=False),
                "gains": simulate(way, 7, options.loops // 4, "normal", planted=True),
                "a climbing loop": simulate(way, 7, options.loops, "normal", planted=False, climbs=True),
            }
    result["about"] = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpus": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
