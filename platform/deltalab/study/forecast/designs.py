"""Compares a study's seeds with as many runs in the other design: in pairs, or with more seeds for the base.

Pairs gain from what seeds share: a difference of two runs of a seed has the variance 2 (1 - r), with r the correlation
of seeds between arms. With n seeds an arm and b of the base, a difference of means has 1 / n + 1 / b - 2 r / b. So the
base deserves more seeds where seeds share little, and pairs are better where they share much.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from deltalab.statistics.joint_test import one_look, seeds_needed
from deltalab.study.forecast.power import Spread, detectable, detectable_by_groups
from deltalab.study.planning.plan import Plan

CLEARLY = 1.1
"""How many times as large the effect of a study must be for the other design to be named. It is known to about 10%."""


@dataclass(frozen=True)
class Design:
    """How many seeds train each candidate of a task.

    Attributes:
        arms: The arms beside the base.
        seeds: The seeds of an arm.
        of_base: The seeds of the base if they are more, else None.
    """

    arms: int
    seeds: int
    of_base: int | None = None

    def __str__(self) -> str:
        """The value of the key `seeds`."""
        return f"{self.seeds}" if self.of_base is None else f"{{arms: {self.seeds}, base: {self.of_base}}}"

    @property
    def runs(self) -> int:
        """The runs of a candidate."""
        return self.arms * self.seeds + (self.of_base or self.seeds)

    def effect(self, tested: int, correlation: float) -> float:
        """Returns the effect that is found with 80% probability, in standard deviations of a seed's score.

        Args:
            tested: The arms that are tested together.
            correlation: The correlation of seeds between arms.
        """
        if self.of_base is not None:
            return detectable_by_groups(self.seeds, self.of_base, tested, correlation)
        return detectable(one_look(self.seeds), tested) * math.sqrt(1 - max(correlation, 0.0))

    @property
    def other(self) -> "Design | None":
        """The other design with about as many runs.

        More seeds for the base are those with which a difference varies least. None if the runs are too few for that.

        Examples:
            >>> str(Design(7, 7).other), str(Design(7, 9).other), Design(7, 6).other, str(Design(7, 6, 16).other)
            ('{arms: 6, base: 14}', '{arms: 7, base: 23}', None, '7')
        """
        if self.of_base is not None:
            return Design(self.arms, round(self.runs / (self.arms + 1)))
        designs = [Design(self.arms, n, self.runs - self.arms * n) for n in range(seeds_needed(), self.seeds)]
        return min(designs, key=lambda design: 1 / design.seeds + 1 / (design.of_base or math.inf), default=None)


def advice(plan: Plan, spreads: Sequence[Spread], tested: int) -> list[str]:
    """Says why the base has more seeds, if it has, and names the other design if that finds clearly smaller effects.

    Args:
        plan: The study.
        spreads: The spreads that are known. Those without a correlation do not count.
        tested: The arms that are tested together.
    """
    spec, lines = plan.spec, []
    design = Design(len(plan.names) - 1, spec.looks[-1].seeds, spec.seeds_of_base)
    if design.of_base is not None:
        lines.append(f"seeds: {design} are not paired; every arm is compared with the base, which so has more.")
    correlations = [spread.correlation for spread in spreads if spread.correlation is not None]
    other = design.other if tested and correlations and len(spec.looks) == 1 and not spec.scales else None
    if other is None:
        return lines
    correlation = math.fsum(correlations) / len(correlations)
    now, then = (of.effect(tested, correlation) for of in (design, other))
    if CLEARLY * then < now:
        lines.append(
            f"seeds: {other} would find {then:.2g} standard deviations of a seed's score in place of {now:.2g}, with "
            f"{other.runs} runs of a candidate in place of {design.runs}: seeds correlate by {correlation:.2f} between "
            "arms."
        )
    return lines
