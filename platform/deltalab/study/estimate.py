"""What a study will cost and what it can show, said before it runs."""

import json
import os
import time
from dataclasses import asdict, dataclass, replace
from typing import Literal

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.study.plan import Plan, PlannedArm
from deltalab.study.stats import seeds_needed, smallest_holm_p, smallest_p
from deltalab.tasks import Task
from deltalab.training.stack import Unstackable
from deltalab.training.train import TrainSpec
from deltalab.training.trainer import LockStep, most_stacked

ALPHA = 0.05
MOST_TIMED_TOKENS = 4096
"""Larger batches are cut to this and the time scaled: planning the paper's grid must not take the paper's time."""


@dataclass(frozen=True)
class ArmCost:
    """An arm on one task. seconds: of all its trials, one after another, on this machine."""

    task: str
    arm: str
    change: str
    parameters: int
    state_size: int
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """A study before it runs. smallest_p: of the sign-flip test, then after Holm over the arms.

    workers: stacks at a time. stack: the most trials in one. seconds: of trials of which each trains alone.
    """

    study: str
    profile: str | None
    arms: list[ArmCost]
    trials: int
    runs: int
    seeds: int
    workers: int
    stack: int | Literal["auto"]
    seconds: float
    smallest_p: float
    smallest_holm_p: float
    seeds_needed: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def to_rich(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for column in ("task", "arm", "change to the base", "parameters", "state", "time"):
            table.add_column(column, overflow="fold")
        for arm in self.arms:
            table.add_row(
                arm.task, arm.arm, arm.change, f"{arm.parameters:,}", f"{arm.state_size:,}", _duration(arm.seconds)
            )
        arms = len({arm.arm for arm in self.arms}) - 1
        verdict = (
            f"enough to tell an arm from the base at {ALPHA}"
            if self.smallest_holm_p <= ALPHA
            else f"too large to tell any arm from the base at {ALPHA}: that takes {self.seeds_needed} seeds"
        )
        alone = self.stack == 1
        lines = [
            f"{self.study}{f' ({self.profile})' if self.profile else ''}: {self.trials} trials, {self.runs} runs, "
            f"about {_duration(self.seconds)} on this machine with {self.workers} at a time"
            + ("" if alone else "; less, where trials of one shape train as one"),
            f"{self.seeds} paired seeds: the sign-flip test cannot go under p = {self.smallest_p:.3g}, after Holm over "
            f"{arms} arm{'s' * (arms != 1)} {self.smallest_holm_p:.3g}, {verdict}",
        ]
        return Group(table, *map(Text, lines))


def estimate(plan: Plan, *, workers: int | None = None) -> Estimate:
    """Builds every arm, times a few of its steps here, and adds up. Raises `InputError` for arms that do not build."""
    wanted = plan.spec.resources
    workers = workers or max(1, wanted.places(os.cpu_count() or 1, torch.cuda.device_count()))
    before = torch.get_num_threads()
    torch.set_num_threads(wanted.threads)
    try:
        arms = [_cost(plan, arm) for arm in plan.arms]
    finally:
        torch.set_num_threads(before)
    others = len(plan.names) - 1
    return Estimate(
        study=plan.spec.name,
        profile=plan.profile,
        arms=arms,
        trials=plan.trials,
        runs=plan.runs,
        seeds=plan.spec.seeds,
        workers=workers,
        stack=wanted.stack,
        seconds=sum(arm.seconds for arm in arms) / workers,
        smallest_p=smallest_p(plan.spec.seeds),
        smallest_holm_p=smallest_holm_p(plan.spec.seeds, max(others, 1)),
        seeds_needed=seeds_needed(max(others, 1), ALPHA),
    )


def _cost(plan: Plan, arm: PlannedArm) -> ArmCost:
    try:
        return _measured(plan, arm)
    except InputError:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        name = arm.config["rule"]["name"]
        raise InputError(
            f"arm '{arm.name}' does not run on task '{arm.task}': {type(error).__name__}: {said}; "
            f"`platform rule check {name}` or `platform task check {plan.tasks[arm.task].name}` may say more"
        ) from error


def _measured(plan: Plan, arm: PlannedArm) -> ArmCost:
    task = plan.tasks[arm.task]
    model, whole = plan.job(arm, "confirm", 0, {}).specs
    timed = replace(
        whole, batch_size=min(whole.batch_size, max(1, MOST_TIMED_TOKENS // task.length)), steps=3, evaluations=1
    )
    try:
        trial, run_step = _timed(task, model, timed, min(plan.spec.seeds, most_stacked(task, model, whole)))
    except Unstackable:
        trial, run_step = _timed(task, model, timed, 1)
    step = run_step * whole.batch_size / timed.batch_size
    # A batch of an evaluation is a forward pass, about a third of a step, at every length that is evaluated.
    tokens = sum(other.length for other in task.evaluations().values()) / task.length
    evaluations = (whole.evaluations + 1) * whole.eval_batches * tokens / 3
    runs = plan.runs / len(plan.arms)
    network = trial.network
    return ArmCost(
        task=arm.task,
        arm=arm.name,
        change=", ".join(f"{key}={_short(value[1])}" for key, value in arm.change.items()),
        parameters=sum(p.numel() for p in network.parameters()),
        state_size=network.state_size(task.length),
        seconds=runs * step * (whole.steps + evaluations),
    )


def _timed(task: Task, model: ModelSpec, spec: TrainSpec, runs: int) -> tuple[LockStep, float]:
    """Seconds for a step of one of so many runs, and what took them."""
    trial = LockStep(task, [(model, spec)], range(runs), most=runs)
    trial.advance(1)
    began = time.perf_counter()
    trial.advance(3)
    return trial, (time.perf_counter() - began) / 2 / runs


def _short(value: object) -> str:
    if isinstance(value, dict) and len(value) == 1:
        ((kind, options),) = value.items()
        return f"{kind}({', '.join(f'{name}={number:g}' for name, number in options.items())})"
    return str(value)


def _duration(seconds: float) -> str:
    """Of the right order: an estimate has no more digits.

    >>> [_duration(s) for s in (0.3, 42, 300, 9000, 900000)]
    ['1 s', '42 s', '5 min', '2.5 h', '10.4 d']
    """
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 200000 else f"{seconds / 86400:.1f} d"
