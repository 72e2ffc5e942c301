"""The figures of a study that has not run, and how a terminal shows them."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalab.reading import pairs
from deltalab.statistics.joint_test import seeds_needed
from deltalab.store.studies.driver_status import duration
from deltalab.study.forecast.placing_time import PlacingTime

MOST_ROWS = 64
"""The rows of a printed table of arms. A plan of more has a row for each arm, with the range of its sizes."""


@dataclass(frozen=True)
class ArmCost:
    """The size and the time of an arm on one task.

    Attributes:
        task: The task's name in the plan.
        arm: The arm's name.
        change: What the arm changes in the base, in words.
        parameters: How many elements are trained.
        dead_parameters: How many of them do nothing; None if the blocks are too large to count them.
        state_size: The elements of the rules' memory of one sequence, KV caches too; None if a module does not say.
        kv_cache: How many of them grow with the sequence.
        conv_cache: The elements that are held beside the memory, which the convolution reads again.
        seconds: The time of all trials of the arm, one after another; None if the time is not known.
    """

    task: str
    arm: str
    change: str
    parameters: int
    dead_parameters: int | None
    state_size: int | None
    kv_cache: int
    conv_cache: int
    seconds: float | None


@dataclass(frozen=True)
class Effect:
    """The effect that a study can find on a task.

    Attributes:
        task: The task's name in the plan.
        metric: The task's metric.
        effect: The difference in the metric that the study finds with 80% probability.
        margin: The least difference that matters.
        equal_seeds: About how many seeds find arms equal that are alike, with 80% probability; None without a margin.
        sd: The standard deviation of a seed's score.
        source: Where the standard deviation comes from, in words.
    """

    task: str
    metric: str
    effect: float
    margin: float
    equal_seeds: int | None
    sd: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """The forecast of a study that has not run.

    Attributes:
        study: The study's name.
        profile: The name of the profile; None without one.
        arms: The arms on each task.
        trials: The most trials that the study takes.
        runs: The most runs that the study takes.
        seeds: The most seeds of an arm.
        seeds_of_base: How many seeds the base has if they are more than those of an arm; None if they are not.
        looks: How many seeds each look has; empty if there is one look.
        workers: How many stacks run at a time.
        stack: The most trials in one stack.
        seconds: The time of the whole study if no trials are stacked; None if the time is not known.
        gpu_hours: The hours of GPUs that `seconds` takes; None if the time is not known, or is that of CPUs.
        price: The price of a GPU's hour; None if it is not given.
        where: The hardware that the time assumes.
        how: How the times were obtained.
        smallest_p: The least p that the seeds can give.
        detectable: The effect on one arm that is found with 80% probability, in standard deviations of a seed's score;
            None if no effect can be found.
        effects: The effect of `detectable` in the metric of each task whose spread is known.
        notes: Further notes on the study, each a sentence.
        overrides: Settings that override the study's file, by their keys.
        placing: What `deltalab place` takes with the study; None if the study has no attention to place.
    """

    study: str
    profile: str | None
    arms: list[ArmCost]
    trials: int
    runs: int
    seeds: int
    seeds_of_base: int | None
    looks: list[int]
    workers: int
    stack: int | Literal["auto"]
    seconds: float | None
    where: str
    how: str
    smallest_p: float
    detectable: float | None
    effects: list[Effect]
    notes: tuple[str, ...]
    overrides: dict[str, Any] = field(default_factory=dict)
    gpu_hours: float | None = None
    price: float | None = None
    placing: PlacingTime | None = None

    def to_json(self) -> str:
        """Writes the estimate as JSON."""
        return json.dumps(asdict(self))

    def to_rich(self) -> Group:
        """Lays the estimate out for a terminal."""
        table = Table(box=None, pad_edge=False)
        more = {"KV cache": "kv_cache", "conv cache": "conv_cache"}
        more = {head: key for head, key in more.items() if any(getattr(arm, key) for arm in self.arms)}
        for column in ("task", "arm", "change to the base", "parameters", "state", *more, "time"):
            table.add_column(column, overflow="fold")
        rows = self._rows()
        for costs in rows:
            states = [arm.state_size - arm.kv_cache for arm in costs if arm.state_size is not None]
            state = from_to(states) if len(states) == len(costs) else "not known"
            caches = [from_to([getattr(arm, key) for arm in costs]) for key in more.values()]
            task = costs[0].task if len(costs) == 1 else f"{len(costs)} tasks"
            change = costs[0].change if len({arm.change for arm in costs}) == 1 else "differs by task"
            seconds = [arm.seconds for arm in costs if arm.seconds is not None]
            total = sum(seconds) if len(seconds) == len(costs) else None
            parameters = from_to([arm.parameters for arm in costs])
            table.add_row(task, costs[0].arm, change, parameters, state, *caches, duration(total))
        time = (
            "for a time that is unknown"
            if self.seconds is None
            else f"about {duration(self.seconds)} on {self.where} with {self.workers} at a time"
            + ("" if self.stack == 1 else "; less, where trials of one shape train as one")
        )
        name = self.study + (f" ({self.profile})" if self.profile else "")
        name += f" with {pairs(self.overrides)}" if self.overrides else ""
        lines = [
            *([] if len(rows) == len(self.arms) else ["Each row is an arm on all its tasks; --json has each task."]),
            f"{name}: {self.trials} trials, {self.runs} runs, {time}",
            self.how,
            *self._paid(),
            *self._power(),
            *self.notes,
            *([] if self.placing is None else [str(self.placing)]),
        ]
        return Group(table, *map(Text, lines))

    def _rows(self) -> list[list[ArmCost]]:
        """Returns the figures that share a row: those of one arm on one task, or on all tasks if there are many."""
        if len(self.arms) <= MOST_ROWS:
            return [[cost] for cost in self.arms]
        rows: dict[str, list[ArmCost]] = {}
        for cost in self.arms:
            rows.setdefault(cost.arm, []).append(cost)
        return list(rows.values())

    def _paid(self) -> list[str]:
        """Says how many hours of GPUs the study takes, and what they cost, in lines of text."""
        if self.gpu_hours is None:
            return []
        cost = "" if self.price is None else f": {self.gpu_hours * self.price:,.2f} at {self.price:g} an hour"
        return [f"{'About' if self.stack == 1 else 'At most'} {self.gpu_hours:,.2g} GPU hours{cost}."]

    def _power(self) -> list[str]:
        """Says how small a difference the study can find, in lines of text."""
        arms = len({arm.arm for arm in self.arms}) - 1
        if not arms:
            return ["There is no arm beside the base: the study compares nothing."]
        if self.detectable is None:
            return [
                f"{self.seeds} paired seeds can find nothing: p is at least {self.smallest_p:.3g}. "
                f"Give at least {seeds_needed()} seeds."
            ]
        if math.isinf(self.detectable):
            power = f"find no effect on one of {arms} arms with 80% probability"
        else:
            power = (
                f"find with 80% probability that one of {arms} arm{'s' * (arms != 1)} differs by {self.detectable:.2g} "
                "standard deviations of a seed's score"
            )
        seeds = f"{self.seeds} paired seeds"
        if self.seeds_of_base is not None:
            seeds = f"{self.seeds} seeds of each arm and {self.seeds_of_base} of the base"
        lines = [f"{seeds} {power}."]
        if self.looks:
            stops = ", ".join(map(str, self.looks))
            lines.append(f"They are added in looks, after {stops} seeds, and an arm may stop before the last.")
        alike: dict[str, list[str]] = {}  # The sizes of a ladder often have the spread of one study.
        for effect in self.effects:
            found = f"{effect.effect:.2g} in {effect.metric} (standard deviation {effect.sd:.2g}, {effect.source})."
            if effect.equal_seeds:
                found += f" To find arms equal within {effect.margin:g} takes about {effect.equal_seeds:,} seeds."
            alike.setdefault(found, []).append(effect.task)
        lines += [f"On {_first(tasks)} that is {found}" for found, tasks in alike.items()]
        known = {effect.task for effect in self.effects}
        if unknown := [task for task in dict.fromkeys(arm.task for arm in self.arms) if task not in known]:
            lines.append(
                f"The spread of seeds on {_first(unknown)} is not known: --sd gives one, or --db a ledger with a "
                "study of the task."
            )
        return lines


def from_to(numbers: Sequence[int]) -> str:
    """Returns the least and the largest of some numbers as text; one number if they are alike."""
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def _first(tasks: Sequence[str]) -> str:
    """The first tasks as text, and how many more there are."""
    return ", ".join(tasks if len(tasks) <= 4 else [*tasks[:3], f"{len(tasks) - 3} more"])
