"""A training that ends after so many seconds: its steps, its rates, and what a kill leaves of its time."""

import math
from pathlib import Path
from typing import Any

import pytest

from deltalab.errors import InputError
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.training import trainer as training
from deltalab.training.schedule import learning_rate
from deltalab.training.spec import TrainSpec
from deltalab.training.time_budget import STEPS, TimeBudget
from deltalab.training.train import TrialResult, train
from deltalab.training.trainer import LockStep

TASK = get_task("mqar", length=16, pairs=2, vocab_size=32)
MODEL = ModelSpec.of({"rule": {"name": "gated_deltanet"}, "vocab_size": 32, "d_model": 16, "layers": 1, "heads": 2})


class Device:
    """A device whose training step takes a second of its own clock, and whose first steps take a minute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float = 1.0) -> None:
        self.now, self.rates = 0.0, dict[int, float]()
        device, run = self, training.Stack._run

        def timed(stack: training.Stack, first: int, last: int) -> None:
            for number in range(first, last):
                compiles = stack.steps <= 3
                device.rates[number] = float(stack.optimizer.lr[number - first, 0])
                run(stack, number, number + 1)
                device.now += 60.0 if compiles else step * len(stack)

        monkeypatch.setattr(training.Stack, "_run", timed)
        monkeypatch.setattr(training, "moment", lambda _: self.now)


def spec(**changes: Any) -> TrainSpec:
    given = {"steps": 400, "batch_size": 4, "lr": 1.0, "evaluations": 4, "eval_batches": 1, "seconds": 50.0}
    return TrainSpec(**{**given, **changes})


def steps_of(result: TrialResult) -> list[float]:
    return [run.final("cost", STEPS) for run in result.runs]


def test_a_training_ends_with_its_seconds_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps compile and are not counted, and runs of a stack have a second each."""
    device = Device(monkeypatch)
    result = train(TASK, MODEL, spec(), [1, 2])
    assert steps_of(result) == [54, 54]
    validated = [step for split, name, step, _ in result.runs[0].metrics if (split, name) == ("validation", "loss")]
    assert validated == [54], "the end is measured, though no measurement was due before step 100"
    for step in (20, 40, 53):
        share = (step - 4) / 50 * 400
        assert device.rates[step] == pytest.approx(learning_rate(1.0, share, 400, warmup=40, kind="cosine"), rel=0.1)
    assert device.rates[53] < 0.01, "the schedule ends where the time does"


def test_steps_end_a_training_that_has_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    result = train(TASK, MODEL, spec(steps=20), [1])
    assert steps_of(result) == [20]
    assert device.rates[12] == pytest.approx(learning_rate(1.0, 12, 20, warmup=2, kind="cosine"), rel=1e-6)


def test_time_before_a_kill_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(step: int, runs: object) -> None:
        raise Killed

    Device(monkeypatch)
    checkpoint = tmp_path / "c.pt"
    of_run = spec(steps=80, evaluations=4)  # measured at step 20, where 16 s are spent
    with pytest.raises(Killed):
        train(TASK, MODEL, of_run, [1], checkpoint=checkpoint, checkpoint_seconds=0, watch=kill)
    result = train(TASK, MODEL, of_run, [1], checkpoint=checkpoint)
    assert steps_of(result) == [20 + 4 + 34], "four more compile again"


def test_a_training_without_an_end_has_the_rates_of_its_steps() -> None:
    trial = LockStep(TASK, [(MODEL, spec(seconds=None))], [1])
    assert trial.budget is None
    assert trial.state_dict()["spent"] == 0.0


def test_a_place_is_that_of_the_steps_or_of_the_time() -> None:
    budget = TimeBudget(10.0, 100)
    assert budget.place(3) == 3
    budget.read(4, None)
    budget.read(8, 2.0)
    assert budget.place(8) == 20
    assert budget.place(10) == pytest.approx(30), "two steps of half a second"
    assert budget.place(99) == 100
    budget.read(9, 8.0)
    assert budget.over


@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "5m", True])
def test_seconds_that_are_none_are_refused(seconds: object) -> None:
    with pytest.raises(InputError, match=r"train\.seconds must be a number above 0"):
        spec(seconds=seconds)
