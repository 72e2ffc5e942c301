"""Forecasts, before a study runs, its size, its time, and the effects that it can find."""

import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

from deltalab.authoring import verdict
from deltalab.authoring.module_checks import unstackable
from deltalab.errors import InputError
from deltalab.models.costs import CostCounter, ModelCosts
from deltalab.models.dead_parameters import MOST_COUNTED, dead_parameters, dead_parameters_text, tried_elements
from deltalab.models.published import preset_text
from deltalab.own_module import OwnModule
from deltalab.reading import pairs
from deltalab.statistics.joint_test import ALPHA, seeds_needed, smallest_p
from deltalab.statistics.unbalanced import RELABELLINGS
from deltalab.store.studies.driver_status import duration
from deltalab.study.forecast.designs import advice
from deltalab.study.forecast.engine_costs import beside_steps, engine_notes
from deltalab.study.forecast.power import Spread, detectable, detectable_by_groups, seeds_to_equal
from deltalab.study.forecast.step_time import Training, gpu_rates, gpu_step, scaled_step, timed_step
from deltalab.study.planning.plan import Plan, PlannedArm
from deltalab.study.specs.ladder_sizes import learning_rates_text
from deltalab.study.specs.recorded_study import RecordedSpec
from deltalab.study.specs.setting_paths import training_part

TIMING_SECONDS = 0.5
"""About how many seconds the arms of a study on CPUs are timed in all. Other arms are scaled by their operations."""

MOST_TRIED = 2**25
"""The parameters of all blocks in which a plan looks for some that do nothing, which takes a second or two."""

SEARCHES = " A search takes about 3 times as long: its candidates train one by one, and each compiles its own kernels."
"""How long a search takes, as the study discover with profile gpu took on an H100: docs/decisions/209."""


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
        where: The hardware that the time assumes.
        how: How the times were obtained.
        smallest_p: The least p that the seeds can give.
        detectable: The effect on one arm that is found with 80% probability, in standard deviations of a seed's score;
            None if no effect can be found.
        effects: The effect of `detectable` in the metric of each task whose spread is known.
        notes: Further notes on the study, each a sentence.
        overrides: Settings that override the study's file, by their keys.
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
        for arm in self.arms:
            state = "not known" if arm.state_size is None else f"{arm.state_size - arm.kv_cache:,}"
            sizes = [f"{arm.parameters:,}", state, *(f"{getattr(arm, key):,}" for key in more.values())]
            table.add_row(arm.task, arm.arm, arm.change, *sizes, duration(arm.seconds))
        time = (
            "for a time that is unknown"
            if self.seconds is None
            else f"about {duration(self.seconds)} on {self.where} with {self.workers} at a time"
            + ("" if self.stack == 1 else "; less, where trials of one shape train as one")
        )
        name = self.study + (f" ({self.profile})" if self.profile else "")
        name += f" with {pairs(self.overrides)}" if self.overrides else ""
        lines = [
            f"{name}: {self.trials} trials, {self.runs} runs, {time}",
            self.how,
            *self._power(),
            *self.notes,
        ]
        return Group(table, *map(Text, lines))

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


def _first(tasks: Sequence[str]) -> str:
    """The first tasks as text, and how many more there are."""
    return ", ".join(tasks if len(tasks) <= 4 else [*tasks[:3], f"{len(tasks) - 3} more"])


def estimate(plan: Plan, *, workers: int | None = None, spreads: Sequence[Spread] = ()) -> Estimate:
    """Forecasts the size and the time of every arm and of the study, within seconds for a study of any size.

    On CPUs some arms are timed, for about `TIMING_SECONDS`. For a GPU nothing is timed: its rates were measured before.

    Args:
        plan: The study.
        workers: How many stacks run at a time; None for as many as this machine has places for.
        spreads: The spreads of scores that are known.

    Raises:
        InputError: An arm does not build or run.
    """
    wanted = plan.spec.resources
    workers = workers or max(1, wanted.places(os.cpu_count() or 1, torch.cuda.device_count()))
    before = torch.get_num_threads()
    torch.set_num_threads(min(wanted.threads, os.cpu_count() or 1))
    try:
        costs, trainings = _counted(plan)
        times = _times(plan, trainings)
    finally:
        torch.set_num_threads(before)
    confirmed = [plan.confirmed(arm) for arm in plan.arms]
    searched = (plan.whole_runs - sum(confirmed)) / len(plan.arms)
    arms = [
        ArmCost(
            task=arm.task,
            arm=arm.name,
            change=", ".join(
                f"{key}={_short(now)}"
                for key, (_, now) in arm.change.items()
                if now is not None
                or not key.startswith("rule.")  # Another rule need not have every knob of the base's.
            ),
            parameters=cost.parameters,
            dead_parameters=dead,
            state_size=None if math.isnan(cost.cache.state) else int(cost.cache.state),
            kv_cache=cost.cache.kv,
            conv_cache=cost.cache.conv,
            seconds=None if step is None else (searched + runs) * (_seconds(training, step) + beside_steps(plan)),
        )
        for arm, runs, (cost, dead), training, step in zip(
            plan.arms, confirmed, costs, trainings, times.steps, strict=True
        )
    ]
    whole = [arm.seconds for arm in arms if arm.seconds is not None]
    seeds, tested = plan.spec.looks[-1].seeds, len(plan.names) - 1
    spec = RecordedSpec(plan.spec.model_dump(include={"family", "scales", "task"}))
    tested *= len(spec.families(list(plan.tasks))[0])
    of_base = plan.spec.seeds_of_base
    effect = None
    if tested and smallest_p(seeds) <= ALPHA:
        effect = (
            detectable(plan.spec.looks, tested) if of_base is None else detectable_by_groups(seeds, of_base, tested)
        )
    return Estimate(
        study=plan.spec.name,
        profile=plan.profile,
        arms=arms,
        trials=plan.trials,
        runs=plan.runs,
        seeds=seeds,
        seeds_of_base=of_base,
        looks=[look.seeds for look in plan.spec.looks] if len(plan.spec.looks) > 1 else [],
        workers=workers,
        stack=1 if plan.spec.engine else wanted.stack,
        seconds=sum(whole) / workers if len(whole) == len(arms) else None,
        where=times.where,
        how=times.how,
        smallest_p=smallest_p(seeds) if of_base is None else min(1.0, tested / RELABELLINGS),
        detectable=effect,
        effects=[
            Effect(
                spread.task,
                spread.metric,
                effect * spread.sd
                if of_base is None
                else detectable_by_groups(seeds, of_base, tested, spread.correlation or 0.0) * spread.sd_of_groups,
                margin,
                seeds_to_equal(spread.sd, margin, tested) if margin else None,
                spread.sd,
                spread.source,
            )
            for spread in spreads
            for margin in [plan.margin(plan.tasks[spread.task])]
            if effect is not None and math.isfinite(effect)
        ],
        notes=(
            *advice(plan, spreads, tested),
            *engine_notes(plan, [cost for cost, _ in costs], [arm.seconds for arm in arms], workers),
            *_searched(plan),
            *plan.notes,
            *_dead(plan, arms),
            *_extended(plan),
            *_one_rate(plan),
            *_flops(plan),
            *_within_seconds(plan, trainings, times.steps),
            *_passes(trainings),
            *_not_checked(plan),
            *_one_by_one(plan),
            *_as_published(plan),
        ),
        overrides=plan.overrides,
    )


def _dead(plan: Plan, costs: list[ArmCost]) -> list[str]:
    """Notes on arms with parameters that do nothing. An arm with as many on each task is named once.

    What a search will find is not known, and its finalists stand in the plan as the base.
    """
    known = [cost for cost, arm in zip(costs, plan.arms, strict=True) if arm.is_base or not plan.spec.search]
    notes = (
        f"{cost.arm}: parameters that do nothing are not counted in blocks of over {MOST_COUNTED:,} parameters, nor in "
        f"the blocks after the first {MOST_TRIED:,}."
        if cost.dead_parameters is None
        else dead_parameters_text(cost.arm, cost.dead_parameters, cost.parameters)
        for cost in known
    )
    return list(dict.fromkeys(filter(None, notes)))


def _not_checked(plan: Plan) -> list[str]:
    """Notes on rules that fail their checks or have not been checked."""
    return [
        f"not checked yet: {rule}; `deltalab study run` checks it first"
        if reason == verdict.NOT_CHECKED
        else f"rule '{rule}' {reason}: `deltalab study run` refuses it"
        for rule, reason in verdict.unchecked(plan.rules).items()
    ]


def _one_by_one(plan: Plan) -> list[str]:
    """Notes on modules of other authors whose runs cannot train as one stack."""
    reasons: dict[str, str | None] = {}
    for block in (block for model in plan.models() for _, block in model.kinds()):
        rule = block.make_rule()
        if isinstance(rule, OwnModule) and rule.name not in reasons:
            reasons[rule.name] = unstackable(rule, block)
    return [f"module '{name}' trains alone, run by run: {reason}." for name, reason in reasons.items() if reason]


def _as_published(plan: Plan) -> list[str]:
    """Says which arms are as their authors publish them. A search makes its arms later."""
    arms = [arm for arm in plan.arms if arm.is_base or not plan.spec.search]
    return [text] if (text := preset_text({arm.name: arm.config for arm in arms})) else []


def _searched(plan: Plan) -> list[str]:
    """What a search draws, what bounds it and what it weighs."""
    search = plan.spec.search
    if search is None:
        return []
    conditional = sum(knob.when is not None for knob in search.searched.values())
    space = f"search: {len(search.searched)} settings"
    space += f", of which {conditional} exist only beside others" if conditional else ""
    space += f"; {search.whole:,} candidates, all tried" if search.enumerated else ""
    if search.match:
        scaled = " and ".join(f"{quantity}, by its {path}" for quantity, path in search.match.dimensions.items())
        space += f"; each candidate is as large as the base in {scaled}"
    space += "".join(f"; {quantity} {bound}" for quantity, bound in search.constrain.bounds.items())
    weighed = ", ".join(f"{objective} ({'more' if objective.maximize else 'less'})" for objective in plan.objectives)
    lines = [f"{space}.", f"search: weighs {weighed}."]
    if not search.enumerated:
        rest = search.trials - search.controls
        random = f", random search {search.controls} as a control" if search.controls else ""
        lines.append(f"search: {search.sampler} draws {rest} of {search.trials} candidates{random}.")
    if search.fidelity:
        rungs = [
            f"{count} at {' and '.join(f'{path} {value}' for path, value in rung.items())}"
            for count, rung in zip(search.halved, search.rungs, strict=True)
        ]
        lines.append(f"search: successive halving trains {', '.join(rungs)}.")
    if search.warm:
        begins = [json.dumps(entry) if isinstance(entry, dict) else entry for entry in search.warm]
        lines.append(f"search: begins with {', '.join(begins)}.")
    if search.proposals:
        lines.append(f"search: {search.proposals} proposes candidates in some of the sampler's places.")
    training = ", ".join(training_part(search.searched))
    most = {arm.is_base: plan.tried(arm) for arm in plan.arms}
    if training:
        arms = "of the base" if most[False] == 1 else "of the base and of each finalist"
        on_tasks = " on each task" if len(plan.tasks) > 1 else ""
        tries = f"tries {most[True]} values of {training}{on_tasks}"
        lines.append(f"search: each seed {arms} {tries}, weighted by the other seeds.")
    return lines


def _extended(plan: Plan) -> list[str]:
    """Notes that tuning may add candidates, if it may."""
    if plan.spec.tune is None or not plan.spec.tune.extend:
        return []
    return ["tune.extend may add candidates, which are not counted here, where a best value is at the end of a range."]


def _counted(plan: Plan) -> tuple[list[tuple[ModelCosts, int | None]], list[Training]]:
    """Returns the model costs, the number of dead parameters and the training of each arm."""
    counter, costs, trainings, tried = CostCounter(), [], [], 0
    counted: dict[tuple[str, int], tuple[ModelCosts, int | None]] = {}
    for arm in plan.arms:
        task = plan.tasks[arm.task]
        model, spec = plan.job(arm, "confirm", 0, {}).specs
        key = repr(model), task.length
        if key not in counted:
            with _naming(plan, arm):
                cost = counter.costs(model, task.length)  # refuses a model that would take long below
                tried += tried_elements(model)
                dead = dead_parameters(model, task.length) if tried <= MOST_TRIED else None
                counted[key] = cost, dead
        cost, _ = counted[key]
        costs.append(counted[key])
        trainings.append(Training(task, model, spec, plan.spec.looks[-1].seeds, cost.flops_per_token))
    return costs, trainings


@dataclass(frozen=True)
class _Times:
    """The times of the arms. `where` and `how` mean the same as in `Estimate`."""

    steps: list[float | None]
    """The seconds of a training step, for each arm; None for an arm whose seconds are not known."""
    where: str
    how: str


def _times(plan: Plan, trainings: list[Training]) -> _Times:
    """Finds the times of the arms, from the measured rates of a GPU or from steps timed here on a CPU."""
    if all(training.spec.device == "cpu" for training in trainings):
        return _on_cpu(plan, trainings)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    kind = here or next(iter(gpu_rates()))
    if kind not in gpu_rates():
        known = ", ".join(gpu_rates())
        return _Times([None] * len(trainings), f"an {kind}", f"No rate was measured on {kind}, only on {known}.")
    how = (
        ("" if here else f"No GPU here: times assume an {kind}. ")
        + "An arm's time is its arithmetic over the rate that Gated DeltaNet and Comba reached at its width; "
        "expect a factor of 2 either way." + (SEARCHES if plan.spec.search else "")
    )
    return _Times([gpu_step(training, kind) for training in trainings], f"an {kind}", how)


def _on_cpu(plan: Plan, trainings: list[Training]) -> _Times:
    """Times one arm of each rule, the base first, and then other arms until `TIMING_SECONDS` have passed."""
    rules = [arm.config["rule"]["name"] for arm in plan.arms]
    timed: dict[int, float] = {}
    began = time.perf_counter()
    for i in sorted(range(len(rules)), key=lambda i: rules.index(rules[i]) != i):
        if timed and time.perf_counter() - began > TIMING_SECONDS:
            break
        with _naming(plan, plan.arms[i]):
            seconds = timed_step(trainings[i])
        if seconds is not None:
            timed[i] = seconds
    if not timed:
        how = "No time is known: a step of each arm takes more than a plan spends on timing it."
        return _Times([None] * len(trainings), "this machine", how)
    known = [(trainings[i], seconds) for i, seconds in timed.items()]
    steps = [timed[i] if i in timed else scaled_step(training, known) for i, training in enumerate(trainings)]
    rest = len(trainings) - len(timed)
    how = f"Times follow from a few steps of {len(timed)} of {len(trainings)} arms, timed here on a CPU" + (
        "; the other arms' are scaled by their arithmetic." if rest else "."
    )
    return _Times([*steps], "this machine", how)


def _seconds(training: Training, step: float) -> float:
    """The time of a run, its evaluations included.

    Args:
        training: The run.
        step: The seconds of a training step. A batch of an evaluation counts as a third of one.
    """
    spec, task = training.spec, training.task
    tokens = 0
    for split, times in (("validation", spec.evaluations), ("test", 1)):
        for other in task.evaluations().values():
            size, batches = task.evaluated(other, split, spec.batch_size, spec.eval_batches)
            tokens += times * size * batches * other.length
    return min(step * spec.steps, spec.seconds or math.inf) + step * tokens / (spec.batch_size * task.length) / 3


def _one_rate(plan: Plan) -> list[str]:
    """Notes that all widths of a ladder train at one learning rate, if they do."""
    tuned = plan.spec.tune.searched if plan.spec.tune else ()
    text = learning_rates_text(plan.spec.scales, tuned) if plan.spec.scales else None
    return [f"scales: {text}. Give transfer: mup, or tune train.lr."] if text and "one learning rate" in text else []


def _flops(plan: Plan) -> list[str]:
    """Notes how many steps the operations of a training are on each task, if operations give the steps."""
    lines = []
    for task in plan.tasks:
        arms = [arm for arm in plan.arms if arm.task == task]
        base = next(arm for arm in arms if arm.is_base)
        if base.flops is not None:
            steps = [arm.config["train"]["steps"] for arm in arms]
            others = f", and of all arms {min(steps):,} to {max(steps):,}" if len(set(steps)) > 1 else ""
            own = base.config["train"]["steps"]
            lines.append(f"train.flops: {base.flops:g} operations on {task} are {own:,} steps of the base{others}.")
    return lines


def _within_seconds(plan: Plan, trainings: list[Training], steps: Sequence[float | None]) -> list[str]:
    """Notes how many steps the time of a training is on each task, if time ends it.

    Args:
        plan: The study.
        trainings: The training of each arm.
        steps: The seconds of a step of each arm; None where it is not known.
    """
    lines = []
    for task in plan.tasks:
        here = [
            (training.spec, step)
            for training, step, arm in zip(trainings, steps, plan.arms, strict=True)
            if arm.task == task
        ]
        seconds = here[0][0].seconds
        if seconds is not None:
            counts = [min(spec.steps, int(seconds / step)) for spec, step in here if step is not None]
            about = f", about {min(counts):,} to {max(counts):,} of them by the time of a step" if counts else ""
            lines.append(
                f"train.seconds: on {task}, {seconds:g} s of steps or {here[0][0].steps:,} steps end a run{about}."
            )
            if counts and max(counts) == here[0][0].steps:
                lines.append(f"train.seconds: train.steps may end runs on {task} before their time: give more steps.")
    return lines


def _passes(trainings: list[Training]) -> list[str]:
    """Notes how often a run reads its task's training data, if the data are finite. Equal notes appear once."""
    lines: dict[str, None] = {}
    for task, spec in ((training.task, training.spec) for training in trainings):
        if task.train_tokens is not None:
            passes = spec.steps * spec.batch_size * task.length / task.train_tokens
            shown = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
            lines[f"{task.name}: a run makes {shown} passes over {task.train_tokens:,} tokens of training data"] = None
    return [*lines]


@contextmanager
def _naming(plan: Plan, arm: PlannedArm) -> Iterator[None]:
    """Names the arm in an error that the block raises."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        name = arm.config["rule"]["name"]
        raise InputError(
            f"arm '{arm.name}' does not run on task '{arm.task}': {type(error).__name__}: {reason}; "
            f"`deltalab rule check {name}` or `deltalab task check {plan.tasks[arm.task].name}` may say more"
        ) from error


def _short(value: object) -> str:
    """Writes the value of a setting for a table."""
    if isinstance(value, dict) and len(value) == 1:
        ((kind, options),) = value.items()
        return f"{kind}({', '.join(f'{name}={number:g}' for name, number in options.items())})"
    return str(value)
