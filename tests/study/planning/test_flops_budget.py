"""Studies whose arms train for equal operations: `train.flops` in place of `train.steps`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode

from deltalab.errors import InputError
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.study.forecast.estimate import estimate
from deltalab.study.planning.make import plan_study
from deltalab.study.planning.plan import Plan
from deltalab.study.reports.report import open_report
from deltalab.study.running.run import run_study_file
from deltalab.tasks import Task
from deltalab.training.evaluation import costs

MQAR: dict[str, Any] = {"length": 48, "pairs": 4, "vocab_size": 64}
FLOPS = 3e9
TRAIN: dict[str, Any] = {"flops": FLOPS, "batch_size": 8, "lr": 0.01, "evaluations": 2, "eval_batches": 1}
STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": MQAR},
    "base": {"rule": "comba", "model": {"d_model": 16, "layers": 1, "heads": 2, "chunk_size": 16}, "train": TRAIN},
    "arms": {
        "attention": {"rule": "attention"},
        "matched": {"rule": "mamba2", "model": {"mlp": False}, "match": {"parameters": True}},
    },
    "seeds": 2,
}


def planned(**changes: Any) -> Plan:
    return plan_study({**STUDY, **changes})


def with_train(**train: Any) -> dict[str, Any]:
    return {**STUDY["base"], "train": {**TRAIN, **train}}


def step_flops(config: dict[str, Any], task: Task) -> float:
    """The operations of a step by the costs that a trial records, and the logits by their definition."""
    model = ModelSpec.of({**config["model"], "rule": config["rule"]})
    counted = {name: value for _, name, _, value in costs(Model(model), task.length, 0)}
    logits = 2 * task.most_scored * model.d_model * model.vocab_size
    return 3 * config["train"]["batch_size"] * (task.length * counted["flops_per_token"] + logits)


def assert_spent(config: dict[str, Any], task: Task, flops: float) -> None:
    steps, step = config["train"]["steps"], step_flops(config, task)
    assert steps * step <= flops < (steps + 1) * step


# Steps


def test_each_arm_trains_the_most_steps_that_the_operations_allow() -> None:
    plan = planned()
    for arm in plan.arms:
        assert_spent(plan.job(arm, "confirm", 0, {}).config, plan.tasks["mqar"], FLOPS)
    assert len({arm.config["train"]["steps"] for arm in plan.arms}) == 3, "rules differ in operations"


def test_a_step_has_the_operations_that_torch_counts_forward_and_backward() -> None:
    task = get_task("text", length=64)
    study = {**STUDY, "task": {"text": {"length": 64}}, "base": {**with_train(), "rule": "attention"}, "arms": {}}
    (arm,) = plan_study(study).arms
    model = Model(ModelSpec.of({**arm.config["model"], "rule": arm.config["rule"]}))
    batch = task.batch("train", 8, 0, 0)
    attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with attention, FlopCounterMode(display=False) as counter:
        torch.nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
    assert FLOPS / arm.config["train"]["steps"] == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_what_a_candidate_changes_is_counted_again() -> None:
    sizes = {"trials": 2, "train.batch_size": {"choice": [8, 16]}}
    plan = planned(tune=sizes)
    for values in plan.candidates(plan.arms[2]):
        assert_spent(plan.config_for(plan.arms[2], values), plan.tasks["mqar"], FLOPS)
    search = {"model.d_model": {"choice": [16, 32]}, "trials": 2, "finalists": 1, "match": {"state": True}}
    plan = planned(search=search, arms={})
    wide = plan.config_for(plan.arms[0], {"model.d_model": 32})
    assert wide["model"]["key_dim"] is not None, "the search has matched it"
    assert_spent(wide, plan.tasks["mqar"], FLOPS)
    assert_spent(plan.arms[1].config, plan.tasks["mqar"], FLOPS)


def test_tasks_and_sizes_have_their_own_steps() -> None:
    tasks = {"short": {**MQAR, "task": "mqar"}, "long": {**MQAR, "task": "mqar", "length": 96}}
    plan = planned(task=tasks, for_task={"long": {"train": {"flops": 2 * FLOPS}}})
    for arm in plan.arms:
        assert_spent(arm.config, plan.tasks[arm.task], FLOPS * (1 + (arm.task == "long")))
    ladder = planned(scales={"model.d_model": [16, 32]}, arms={"attention": {"rule": "attention"}})
    for arm in ladder.arms:
        assert_spent(arm.config, ladder.tasks[arm.task], FLOPS)


def test_the_steps_and_not_the_operations_are_the_trial() -> None:
    by_flops = planned()
    for arm in by_flops.arms:
        given = {key: value for key, value in TRAIN.items() if key != "flops"}
        base = {**STUDY["base"], "train": {**given, "steps": arm.config["train"]["steps"]}}
        by_steps = planned(base=base)
        same = next(other for other in by_steps.arms if other.name == arm.name)
        assert by_steps.job(same, "confirm", 0, {}).key == by_flops.job(arm, "confirm", 0, {}).key


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base": with_train(steps=10)}, "base sets train.steps, and base train.flops"),
        ({"arms": {"x": {"train": {"steps": 10}}}}, "arms.x sets train.steps, and base train.flops, which gives the"),
        ({"arms": {"x": {"train": {"flops": 1e9}}}}, "arms.x sets train.flops, and all arms train for as many"),
        ({"for_task": {"mqar": {"train": {"steps": 9}}}}, "for_task.mqar sets train.steps, and base train.flops"),
        ({"scales": {"train.steps": [10, 20]}}, "scales sets train.steps, and base train.flops"),
        ({"tune": {"trials": 2, "train.steps": {"choice": [9, 20]}}}, "tune sets train.steps"),
        (
            {
                "arms": {},
                "search": {
                    "rule.d": {"choice": [0, 1]},
                    "trials": 2,
                    "finalists": 1,
                    "fidelity": {"train.steps": [2, 4]},
                },
            },
            "search.fidelity sets train.steps",
        ),
        ({"base": with_train(flops=-1e9)}, "base: train.flops must be a number above 0, not -1000000000.0"),
        ({"base": with_train(flops="5m")}, "base: train.flops must be a number above 0, not '5m'"),
        ({"base": with_train(flops=True)}, "base: train.flops must be a number above 0, not True"),
        ({"base": with_train(flops=1e3)}, "base: train.flops 1000: a step takes"),
        ({"base": with_train(flops=1e30)}, "and a training has at most 1,000,000,000 steps"),
        ({"base": with_train(flops=FLOPS / 100, evaluations=50)}, "train.evaluations 50 exceed steps"),
        ({"base": {**with_train(), "train": {"batch_size": 8, "lr": 1}}}, "base: train: needs steps or flops"),
        ({"base": with_train(flop=1)}, "base: unknown train key 'flop'; did you mean 'flops'?"),
    ],
)
def test_one_line_refuses_what_gives_no_steps(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        planned(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_module_whose_operations_cannot_be_counted_is_refused(tmp_path: Path) -> None:
    module = "import torch\nclass M(torch.nn.Module):\n    def __init__(self, d_model):\n        super().__init__()\n"
    (tmp_path / "m.py").write_text(f"{module}    def forward(self, x):\n        raise RuntimeError('needs a GPU')\n")
    base = {**with_train(), "rule": None, "model": {**STUDY["base"]["model"], "mixer": f"{tmp_path}/m.py:M"}}
    with pytest.raises(
        InputError, match=r"cannot be counted on a CPU, so give train\.steps: RuntimeError: needs a GPU"
    ):
        planned(base=base, arms={})


# Plan and report


def test_plan_and_report_say_how_many_steps(tmp_path: Path) -> None:
    file, db = tmp_path / "s.yaml", tmp_path / "lab.db"
    file.write_text(yaml.safe_dump({**STUDY, "base": with_train(flops=FLOPS / 50)}))
    plan = plan_study(file)
    steps = [arm.config["train"]["steps"] for arm in plan.arms]
    span = f"{min(steps):,} to {max(steps):,}"
    note = f"train.flops: 6e+07 operations on mqar are {steps[0]:,} steps of the base, and of all arms {span}."
    assert note in estimate(plan).notes
    run_study_file(file, db=db, executor="inline", unchecked=True)
    report = open_report("s", db=db)
    assert any(f"6e+07 on mqar, in {span} steps." in line for line in report.notes)
