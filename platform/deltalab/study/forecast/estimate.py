"""Forecasts, before a study runs, its size, its time, and the effects that it can find."""

import math
import os
from collections.abc import Sequence

import torch

from deltalab.errors import InputError
from deltalab.models.costs import CostCounter, ModelCosts
from deltalab.models.dead_parameters import MOST_TOKENS, ROWS, TOKENS, dead_parameters, tried_elements
from deltalab.statistics.joint_test import ALPHA, smallest_p
from deltalab.statistics.unbalanced import RELABELLINGS
from deltalab.study.forecast.arm_times import naming, step_times
from deltalab.study.forecast.designs import advice
from deltalab.study.forecast.engine_costs import beside_steps, engine_notes
from deltalab.study.forecast.evaluation_time import evaluation_notes, evaluation_seconds
from deltalab.study.forecast.figures import ArmCost, Effect, Estimate
from deltalab.study.forecast.notes import MOST_MODELS, MOST_TRIED, MOST_WRITTEN, notes_of
from deltalab.study.forecast.placing_time import placing_time
from deltalab.study.forecast.power import Spread, detectable, detectable_by_groups, seeds_to_equal
from deltalab.study.forecast.step_time import Training, evaluated
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.recorded_study import RecordedSpec


def estimate(
    plan: Plan, *, workers: int | None = None, spreads: Sequence[Spread] = (), price: float | None = None
) -> Estimate:
    """Forecasts the size and the time of every arm and of the study, within seconds for a study of any size.

    On CPUs some arms are timed, for about `arm_times.TIMING_SECONDS`. For a GPU nothing is timed: its rates were
    measured before.

    Args:
        plan: The study.
        workers: How many stacks run at a time; None for as many as this machine has places for.
        spreads: The spreads of scores that are known.
        price: The price of a GPU's hour.

    Raises:
        InputError: An arm does not build or run, or a price is given for a study without GPUs.
    """
    if price is not None and not plan.spec.resources.gpu:
        raise InputError("--price is that of a GPU's hour, and the study has resources without gpu")
    wanted = plan.spec.resources
    workers = workers or max(1, wanted.places(os.cpu_count() or 1, torch.cuda.device_count()))
    before = torch.get_num_threads()
    torch.set_num_threads(min(wanted.threads, os.cpu_count() or 1))
    try:
        costs, trainings = _counted(plan)
        times = step_times(plan, trainings)
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
            seconds=None
            if step is None
            else (searched + runs) * (_seconds(training, step) + beside_steps(plan))
            + runs * evaluation_seconds(plan, arm, training, step),
        )
        for arm, runs, (cost, dead), training, step in zip(
            plan.arms, confirmed, costs, trainings, times.steps, strict=True
        )
    ]
    whole = [arm.seconds for arm in arms if arm.seconds is not None]
    seconds = sum(whole) / workers if len(whole) == len(arms) else None
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
        seconds=seconds,
        gpu_hours=sum(whole) * wanted.gpu / 3600 if wanted.gpu and len(whole) == len(arms) else None,
        price=price,
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
            *engine_notes(plan, [cost for cost, _ in costs], workers),
            *evaluation_notes(plan),
            *notes_of(plan, arms, trainings, times.steps),
        ),
        overrides=plan.overrides,
        placing=placing_time(plan, trainings[0], times.steps[0], runs=arms[0].seconds, study=seconds, workers=workers),
    )


def _counted(plan: Plan) -> tuple[list[tuple[ModelCosts, int | None]], list[Training]]:
    """Returns the model costs, the number of dead parameters and the training of each arm."""
    counter, costs, trainings, tried, written = CostCounter(), [], [], 0, 0.0
    counted: dict[tuple[str, int], tuple[ModelCosts, int | None]] = {}
    for arm in plan.arms:
        task = plan.tasks[arm.task]
        model, spec = plan.job(arm, "confirm", 0, {}).specs
        key = repr(model), task.length
        if key not in counted:
            with naming(plan, arm):
                cost = counter.costs(model, task.length)  # refuses a model that would take long below
                tried += tried_elements(model)
                short, long = (ROWS * min(task.length, n) * cost.written_per_token for n in (TOKENS, MOST_TOKENS))
                few = tried <= MOST_TRIED and len(counted) < MOST_MODELS and written + short <= MOST_WRITTEN
                dead = dead_parameters(model, task.length, retried=written + long <= MOST_WRITTEN) if few else None
                written += (short if few else 0) + (long if few and dead != 0 else 0)
                counted[key] = cost, dead
        cost, _ = counted[key]
        costs.append(counted[key])
        seeds = plan.spec.looks[-1].seeds
        trainings.append(Training(task, model, spec, seeds, cost.flops_per_token, cost.written_per_token))
    return costs, trainings


def _seconds(training: Training, step: float) -> float:
    """The time of a run, its evaluations included.

    Args:
        training: The run.
        step: The seconds of a training step.
    """
    spec = training.spec
    evaluations = spec.evaluations * evaluated(training, "validation") + evaluated(training, "test")
    return min(step * spec.steps, spec.seconds or math.inf) + step * evaluations


def _short(value: object) -> str:
    """Writes the value of a setting for a table."""
    if isinstance(value, dict) and len(value) == 1:
        ((kind, options),) = value.items()
        if isinstance(options, dict):
            return f"{kind}({', '.join(f'{name}={number:g}' for name, number in options.items())})"
    return str(value)
