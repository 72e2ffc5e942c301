"""How long the training steps of a plan's arms take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from deltalab.errors import InputError
from deltalab.study.forecast.step_time import Training, gpu_rates, gpu_step, scaled_step, timed_step
from deltalab.study.planning.plan import Plan, PlannedArm

TIMING_SECONDS = 0.5
"""About how many seconds the arms of a study on CPUs are timed in all. Other arms are scaled by their operations."""

SEARCHES = " A search takes about 3 times as long: its candidates train one by one, and each compiles its own kernels."
"""How long a search takes, as the study discover with profile gpu took on an H100: docs/decisions/209."""


@dataclass(frozen=True)
class StepTimes:
    """The times of the arms' steps. `where` and `how` mean the same as in `Estimate`."""

    steps: list[float | None]
    """The seconds of a training step, for each arm; None for an arm whose seconds are not known."""
    where: str
    how: str


def step_times(plan: Plan, trainings: list[Training]) -> StepTimes:
    """Finds the times of the arms, from the measured rates of a GPU or from steps timed here on a CPU."""
    if all(training.spec.device == "cpu" for training in trainings):
        return _on_cpu(plan, trainings)
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    kind = here or next(iter(gpu_rates()))
    if kind not in gpu_rates():
        known = ", ".join(gpu_rates())
        return StepTimes([None] * len(trainings), f"an {kind}", f"No rate was measured on {kind}, only on {known}.")
    how = (
        ("" if here else f"No GPU here: times assume an {kind}. ")
        + "An arm's time is its arithmetic over the rate that Gated DeltaNet and Comba reached at its width; "
        "expect a factor of 2 either way." + (SEARCHES if plan.spec.search else "")
    )
    return StepTimes([gpu_step(training, kind) for training in trainings], f"an {kind}", how)


def _on_cpu(plan: Plan, trainings: list[Training]) -> StepTimes:
    """Times one arm of each rule, the base first, and then other arms until `TIMING_SECONDS` have passed."""
    rules = [arm.config["rule"]["name"] for arm in plan.arms]
    timed: dict[int, float] = {}
    began = time.perf_counter()
    for i in sorted(range(len(rules)), key=lambda i: rules.index(rules[i]) != i):
        if timed and time.perf_counter() - began > TIMING_SECONDS:
            break
        with naming(plan, plan.arms[i]):
            seconds = timed_step(trainings[i])
        if seconds is not None:
            timed[i] = seconds
    if not timed:
        how = "No time is known: a step of each arm takes more than a plan spends on timing it."
        return StepTimes([None] * len(trainings), "this machine", how)
    known = [(trainings[i], seconds) for i, seconds in timed.items()]
    steps = [timed[i] if i in timed else scaled_step(training, known) for i, training in enumerate(trainings)]
    rest = len(trainings) - len(timed)
    how = f"Times follow from a few steps of {len(timed)} of {len(trainings)} arms, timed here on a CPU" + (
        "; the other arms' are scaled by their arithmetic." if rest else "."
    )
    return StepTimes([*steps], "this machine", how)


@contextmanager
def naming(plan: Plan, arm: PlannedArm) -> Iterator[None]:
    """Names the file and the arm in an error that the block raises."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{plan.study_file}: arm '{arm.name}': {error}") from None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        name = arm.config["rule"]["name"]
        raise InputError(
            f"arm '{arm.name}' does not run on task '{arm.task}': {type(error).__name__}: {reason}; "
            f"`deltalab rule check {name}` or `deltalab task check {plan.tasks[arm.task].name}` may say more"
        ) from error
