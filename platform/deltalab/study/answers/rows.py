"""The data of an answer: a row for each arm on each task, and a table of rows for each task."""

import math
from dataclasses import dataclass, field
from typing import Any

from deltalab.statistics.intervals import Interval, Share
from deltalab.statistics.joint_test import Difference
from deltalab.store.models import Stage

VERDICTS = ("better", "equal or better", "equal", "equal or worse", "worse", "undecided")
"""What the test can say of an arm that was compared with enough seeds."""
OVER_TASKS = "over tasks"
"""What the table of the means over tasks has for a task; no task has a space in its name."""
SPLIT: dict[Stage, str] = {"tune": "validation", "confirm": "test"}
"""The split whose scores a stage of a study compares."""


@dataclass(frozen=True)
class SeedScore:
    """The result of an arm with one seed.

    Attributes:
        score: The mean of the seed's test scores, weighted by the arm's other seeds. It is what the test compares.
        difference: The score minus the reference's, as the test has it; None if the test did not take the seed, or has
            no pairs.
        candidate: The number of the candidate with the greatest weight; None if the seed's run of it did not finish.
        values: The values of this candidate.
        one_setting: The test score of the values in `Row.tuned`; None if no candidate finished all seeds.
    """

    score: float
    difference: float | None
    candidate: int | None
    values: dict[str, Any]
    one_setting: float | None


@dataclass(frozen=True)
class Row:
    """The results of one arm on one task.

    Attributes:
        arm: The name of the arm.
        is_base: Whether the arm is the base of the study.
        is_reference: Whether the others are compared with the arm. It is the base, unless the reader asked for another.
        verdict: What the test says: one of `VERDICTS`, or the reason that the arm is not compared, such as "base", or
            "reference" if the reader asked for another reference than the base.
        score: The mean of the seeds' scores and its 95% interval.
        diverged: The number of runs that diverged.
        difference: Arm minus reference, paired by seed unless the base has more seeds; interval and p hold jointly over
            the family.
        learned: The share of seeds that learned the task; None if all seeds of the table did.
        seconds: The training time of all trials of the arm.
        microseconds_per_token: The training time of one token.
        state_size: The elements of the rules' memory, KV caches too.
        kv_cache: How many of them grow with the sequence; None if the ledger does not say.
        conv_cache: The elements that are held beside the memory, for the convolution; None if `state_size` counts them.
        parameters: The number of parameters.
        dead_parameters: How many of them do nothing; None if the ledger does not say.
        flops_per_token: The operations of matrix products for one token of the forward pass.
        tuned: The values that are best on validation over all seeds.
        chose: With how many seeds the values in `tuned` have the greatest weight.
        by_budget: The expected score by how many of the candidates had been tried.
        by_seed: The difference to the reference for each seed; empty if the test has no pairs.
        scores: The result of each seed.
        one_setting: The mean test score of the values in `tuned`; None if there was one candidate. These values were
            chosen by the very seeds, so it is somewhat optimistic.
        seeds_needed: About how many seeds would decide an undecided difference, as a further look; None if it is
            decided, or unknown, and over tasks or with more seeds of the base, where further looks do not count.
        metrics: Each further metric of the task -> its mean over the seeds that have it, weighted as the scores are,
            and its 95% interval. No test compares them.
        iqm: The interquartile mean of the scores over tasks and seeds; None on a single task.
        iqm_difference: The interquartile mean minus that of the reference. Intervals hold jointly over the arms, apart
            from those of `difference`.
        unbiased: The difference without the optimism of an early decision; None if the study has a single look, and for
            an arm that goes on, was given up or equals the base.
    """

    arm: str
    is_base: bool
    is_reference: bool
    verdict: str
    score: Interval
    diverged: int
    difference: Difference | None
    learned: Share | None
    seconds: float | None
    microseconds_per_token: float | None
    state_size: int | None
    kv_cache: int | None
    conv_cache: int | None
    parameters: int | None
    dead_parameters: int | None
    flops_per_token: float | None
    tuned: dict[str, Any]
    chose: int
    by_budget: dict[int, float]
    by_seed: dict[int, float] = field(default_factory=dict)
    scores: dict[int, SeedScore] = field(default_factory=dict)
    one_setting: Interval | None = None
    seeds_needed: int | None = None
    metrics: dict[str, Interval] = field(default_factory=dict)
    iqm: float | None = None
    iqm_difference: Difference | None = None
    unbiased: float | None = None

    @property
    def called(self) -> str:
        """What a sentence calls the arm: "the base", or its name."""
        return "the base" if self.is_base else self.arm

    @property
    def recurrent_state(self) -> int | None:
        """The elements of the memory that no token adds to; all that is held if the ledger does not tell them apart."""
        return None if self.state_size is None else self.state_size - (self.kv_cache or 0)


@dataclass(frozen=True)
class Interaction:
    """The effect of the changes of two arms made together, minus the sum of their separate effects.

    Attributes:
        a: The first arm.
        b: The second arm.
        both: The arm that makes the changes of both.
        difference: (both - a - b + base), by seed.
    """

    a: str
    b: str
    both: str
    difference: Difference


@dataclass(frozen=True)
class TaskTable:
    """The results of all arms on one task, or over all tasks.

    Attributes:
        task: The name of the task, or `OVER_TASKS`.
        version: The version of the task.
        metric: The metric that is compared.
        margin: The least difference of the metric that matters.
        maximize: Whether more of the metric is better.
        chance: The metric of a model that has learned nothing.
        split: The split that the scores are on.
        rows: A row for each arm, in the order of the study.
        front: The arms that no other arm beats in mean metric, operations per token and state size at once.
        interactions: The interaction of each pair of arms whose changes a third arm combines.
        warnings: Sentences that a reader must know before the table.
        notes: Sentences that help to read the table but are no warnings.
        over: The tasks that the scores are means over; empty for the table of one task.
    """

    task: str
    version: int | None
    metric: str
    maximize: bool
    chance: float
    margin: float
    split: str
    rows: list[Row]
    front: list[str]
    interactions: list[Interaction]
    warnings: list[str]
    notes: list[str]
    over: list[str] = field(default_factory=list)

    @property
    def trained(self) -> str:
        """The task without the name of a further metric, which `metric` says."""
        return self.task.removesuffix(f": {self.metric}")

    @property
    def sign(self) -> int:
        """1 if more of the metric is better, else -1."""
        return 1 if self.maximize else -1

    @property
    def reference(self) -> Row:
        """The row of the arm that the others are compared with."""
        return next(row for row in self.rows if row.is_reference)

    @property
    def metrics(self) -> list[str]:
        """The further metrics that any arm has."""
        return list(dict.fromkeys(name for row in self.rows for name in row.metrics))

    @property
    def best(self) -> Row | None:
        """The row with the best mean: of equals the base, then the first in the study; None if no arm has a score."""
        scored = [row for row in self.rows if math.isfinite(row.score.mean)]
        return max(scored, key=lambda row: (self.sign * row.score.mean, row.is_base), default=None)
