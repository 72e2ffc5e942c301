"""Trials that train as one: which go together, and that nobody can tell from the study's results."""

import itertools
import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from textwrap import indent
from typing import Any, ClassVar

import pytest
import torch
import yaml
from tests.support.delta_rule import delta_rule

from deltalab import registry
from deltalab.errors import InputError
from deltalab.store import RuleRecord, RunRecord, Store, TrialRecord
from deltalab.study.forecast.estimate import estimate
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running import schedule as scheduling
from deltalab.study.running.run import arm_records, run_study_file
from deltalab.study.running.schedule import Schedule
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers import train_stack as trials
from deltalab.study.workers.jobs import Job, Lost, interrupted_stacks_in
from deltalab.study.workers.train_stack import execute
from deltalab.study.workers.worker import Worker
from deltalab.training import trainer
from deltalab.training.train import train_together

MQAR = {"length": 16, "pairs": 2, "vocab_size": 32}
LR = {"log_uniform": [1e-3, 1e-1]}
STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": MQAR},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "mlp": False, "chunk_size": 16},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 3, "eval_batches": 1},
    },
    "arms": {
        "init_d_1": {"rule": {"d": {"head": {"init": 1}}}},  # of the base's shape
        "without_b": {"rule": {"b": 1}},
        "wide": {"model": {"expand_v": 2}},
    },
    "tune": {"trials": 3, "train.lr": LR},
    "seeds": 2,
}


def write(lab: Path, **given: Any) -> Path:
    file = lab / "s.yaml"
    file.write_text(yaml.safe_dump({**STUDY, **given}, sort_keys=False))
    return file


def planned(lab: Path, **given: Any) -> Plan:
    return make_plan(load_study(write(lab, **given)))


def schedule(found: Plan, store: Store, left: Sequence[tuple[str, ...]] = ()) -> Schedule:
    spec = found.spec.model_dump(mode="json")
    study_id = store.begin_study(found.spec.name, None, found.identity, spec, arm_records(found), {})
    return Schedule(found, store, study_id, left)


def record(job: Job) -> TrialRecord:
    """A trial that went as well as its configuration and the length of its arm's name say."""
    value = 1 / (1 + abs(job.config["train"]["lr"] - 0.02)) - 0.1 * job.config["model"]["expand_v"]
    value -= 0.001 * len(job.arm)
    return TrialRecord(
        key=job.key,
        task=job.task,
        task_version=job.task_version,
        stage=job.stage,
        config=job.config,
        state="done",
        started_at=0,
        finished_at=1,
        seconds=1,
        rule=RuleRecord(job.config["rule"]["name"], "hash", "source"),
        runs=[
            RunRecord(seed, metrics=[(split, "accuracy", 6, value) for split in ("validation", "test")])
            for seed in job.seeds
        ],
    )


def names(stack: Sequence[Job]) -> list[tuple[str, int]]:
    return [(job.arm, job.number) for job in stack]


# Who goes with whom.


def test_a_stack_is_of_one_task_and_shape(lab: Path, store: Store) -> None:
    tasks = {"mqar": MQAR, "short": {**MQAR, "task": "mqar", "length": 8}}
    one = schedule(planned(lab, task=tasks, resources={"stack": 100}), store)
    stacks = []
    while stack := one.next(places=1):
        stacks.append(stack)
        for job in stack:
            one.finished(record(job))
    assert one.done
    assert len(stacks) == 2 * 3
    for stack in stacks:
        assert len({(job.task, job.stage, job.seeds) for job in stack}) == 1
        arms = {job.arm for job in stack}
        assert arms in ({"base", "init_d_1"}, {"without_b"}, {"wide"})
        assert len(stack) == len(arms) * 3


def test_no_stack_is_larger_than_the_study_says(lab: Path, store: Store) -> None:
    one = schedule(planned(lab, resources={"stack": 4}), store)
    stacks = [one.next(places=1) for _ in range(5)]
    assert [len(stack) for stack in stacks] == [4, 3, 3, 2, 0]


def test_auto_shares_the_work_over_the_gpus(lab: Path, store: Store) -> None:
    found = planned(lab, arms={}, tune={"trials": 8, "train.lr": LR}, resources={"gpu": 1})
    one = schedule(found, store)
    assert [len(one.next(places=4)) for _ in range(4)] == [2, 2, 2, 2]
    alone = schedule(found, store)
    assert len(alone.next(places=1)) == 8


def test_auto_weighs_trials_by_their_steps(lab: Path, store: Store) -> None:
    tasks = {"long": {**MQAR, "task": "mqar"}, "short": {**MQAR, "task": "mqar"}}
    rates = {f"lr_{i}": {"train": {"lr": 0.01 + 0.001 * i}} for i in range(1, 6)}
    more = {"task": tasks, "for_task": {"short": {"train": {"steps": 3}}}, "arms": rates, "tune": None}
    one = schedule(planned(lab, **more, resources={"gpu": 1}), store)
    stacks = [one.next(places=2) for _ in range(3)]
    told = [(len(stack), {job.task for job in stack}) for stack in stacks]
    assert told == [(5, {"long"}), (1, {"long"}), (6, {"short"})], "30 steps for one GPU, 24 for the other"


def test_auto_on_a_cpu_is_what_a_core_gains_from(lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = planned(lab, arms={}, tune={"trials": 8, "train.lr": LR})
    for runs, sizes in {6: [3, 3, 2], 5: [2, 2, 2, 2], 1: [1] * 8, 1000: [4, 4]}.items():
        tokens = 4 * MQAR["length"] * 16
        monkeypatch.setitem(trainer.SATURATED, "cpu", runs * tokens)
        one = schedule(found, store)
        assert [len(one.next(places=2 if runs == 1000 else 1)) for _ in sizes] == sizes


def test_arms_of_which_a_token_takes_long_go_first_at_the_next_look(lab: Path, store: Store) -> None:
    flops = {"base": 1000.0, "init_d_1": 1000.0, "without_b": 900.0, "wide": 2000.0}
    one = schedule(planned(lab, seeds={"at_least": 2, "at_most": 3}, resources={"stack": 9}), store)
    order = []
    while stack := one.next(places=1):
        order.append((stack[0].seeds, stack[0].arm))
        for job in stack:
            made = record(job)
            cost = ("cost", "flops_per_token", 6, flops[job.arm])
            one.finished(replace(made, runs=[replace(run, metrics=[*run.metrics, cost]) for run in made.runs]))
    assert [arm for seeds, arm in order if seeds == (3,)] == ["wide", "base", "without_b"]


@pytest.mark.parametrize("stack", [0, -1, True, 1.5, "all", None])
def test_a_stack_is_a_number_or_auto(lab: Path, stack: Any) -> None:
    with pytest.raises(InputError, match=r"resources.stack: must be auto or a whole number of at least 1"):
        planned(lab, resources={"stack": stack}) if stack is not None else planned(lab, resources={"stack": []})


# Neither stacks nor timing change what a study computes.


@pytest.mark.slow(keep="True")
@pytest.mark.parametrize("search", [False, True])
def test_a_study_is_the_same_whatever_its_stacks_and_whoever_is_first(lab: Path, search: bool) -> None:
    """With more trials than candidates that need no results: the sampler looks at those of whole batches alone."""
    changed: dict[str, Any] = {"tune": {"trials": 23, "train.lr": LR}}
    if search:
        space = {"train.lr": LR, "model.expand_v": {"choice": [1, 2]}}
        changed = {"tune": None, "arms": {}, "search": {**space, "trials": 23, "finalists": 2}}
    ran: list[set[tuple[str, str, int, str]]] = []
    for seed, stack in enumerate([1, 1, 4, 100]):
        found = planned(lab, **changed, resources={"stack": stack})
        with Store.open(lab / f"{seed}.db") as store:
            one = schedule(found, store)
            order, flying = random.Random(seed), list[Job]()
            while True:
                while len(flying) < 5 and (more := one.next(places=1)):
                    flying += more
                if not flying:
                    break
                one.finished(record(flying.pop(order.randrange(len(flying)) if seed else 0)))
            assert one.done
            rows = store.trials(one.study_id)
            ran.append({(row.key, row.arm, row.number, json.dumps(row.values)) for row in rows})
    assert len(ran[0]) == planned(lab, **changed).trials
    assert all(other == ran[0] for other in ran[1:])


def ledger(db: Path) -> tuple[list[Any], dict[Any, float]]:
    """Who ran, and the metrics."""
    with closing(sqlite3.connect(db)) as ask:
        places = "SELECT arm.name, number, key, trial.state FROM arm_trial JOIN arm ON arm.id = arm_id "
        runs = "SELECT key, seed, split, name, step, value FROM metric JOIN run ON run.id = run_id "
        return (
            sorted(ask.execute(places + "JOIN trial ON trial.id = trial_id")),
            {row[:-1]: row[-1] for row in ask.execute(runs + "JOIN trial ON trial.id = trial_id")},
        )


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_training_in_stacks_records_what_training_alone_does(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def seen(task: Any, members: Any, *args: Any, **given: Any) -> Any:
        sizes.append(len(members))
        return train_together(task, members, *args, **given)

    monkeypatch.setattr(trials, "train_together", seen)
    alone = run_study_file(write(lab, resources={"stack": 1}), db=lab / "alone.db", executor="inline")
    assert set(sizes) == {1}
    assert len(sizes) == alone.trials == 12
    sizes.clear()
    together = run_study_file(write(lab, resources={"stack": 8}), db=lab / "together.db", executor="inline")
    assert sorted(sizes) == [3, 3, 6]
    assert (together.trials, together.failed) == (12, 0)
    assert ledger(lab / "alone.db") == ledger(lab / "together.db"), (
        "to the last bit: with more than one head, every product is one of matrices"
    )
    verdicts = [[(row.arm, row.verdict) for row in one.report.tables[0].rows] for one in (alone, together)]
    assert verdicts[0] == verdicts[1]
    assert run_study_file(write(lab), db=lab / "together.db", executor="inline").known == 12


def test_trials_that_share_a_stack_share_its_time(lab: Path) -> None:
    found = planned(lab)
    stack = [found.job(found.arms[0], "confirm", i, {"train.lr": lr}) for i, lr in enumerate((0.01, 0.02))]
    records = execute(stack, lab / "runs")
    assert [one.key for one in records] == [job.key for job in stack]
    for one in records:
        assert one.seconds == pytest.approx((one.finished_at - one.started_at) / 2, abs=1e-6)  # rounding of the date


# One member's trouble.


def choices(*values: float) -> dict[str, Any]:
    return {
        "arms": {},
        "tune": {"trials": len(values), "train.lr": {"choice": list(values)}},
        "resources": {"stack": 9},
    }


@pytest.mark.usefixtures("in_process")
def test_a_member_that_raises_takes_no_other_along(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(task: Any, members: Any, *args: Any, **given: Any) -> Any:
        if any(spec.lr == 0.02 for _, spec in members):
            raise RuntimeError("not with 0.02")
        return train_together(task, members, *args, **given)

    monkeypatch.setattr(trials, "train_together", picky)
    result = run_study_file(write(lab, **choices(0.01, 0.02, 0.03)), executor="inline")
    assert (result.trials, result.failed) == (3, 1)
    (failure,) = result.report.failures
    assert (failure.number, failure.message) == (1, "RuntimeError: not with 0.02")
    assert not list((lab / "runs" / "checkpoints").glob("*"))


def test_weights_that_cannot_be_written_are_no_fault_of_a_member(lab: Path) -> None:
    found = planned(lab)
    stack = [found.job(arm, "confirm", 0, {}) for arm in found.arms[:2]]
    (lab / "runs" / "weights").mkdir(parents=True)
    (lab / "runs" / "weights" / stack[0].key).write_text("a file where a folder should be")
    with pytest.raises(Lost, match=r"weights and checkpoints in .*File exists") as lost:
        execute(stack, lab / "runs")
    assert lost.value.of == "infrastructure"


def test_a_member_that_diverges_takes_no_other_along(lab: Path) -> None:
    base = {**STUDY["base"], "train": {**STUDY["base"]["train"], "clip": 0.0}}
    result = run_study_file(write(lab, base=base, **choices(0.01, 1e30, 0.02)), executor="inline")
    assert result.failed == 0
    with Store.open(lab / "deltalab.db") as store:
        rows = {row.number: row for row in store.trials(result.study_id)}
    states = [list(rows[number].runs.values()) for number in range(3)]
    assert states == [["done"] * 2, ["diverged"] * 2, ["done"] * 2]


def test_a_deadline_is_for_each_of_those_who_share_the_time(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trials.time, "monotonic", lambda: now[0])

    def slow(task: Any, members: Any, seeds: Any, *, beat: Any, **given: Any) -> Any:
        now[0] += 25
        beat("step", 2)
        now[0] += 10
        beat("step", 3)

    monkeypatch.setattr(trials, "train_together", slow)
    found = planned(lab, deadline=10)
    stack = [found.job(found.arms[0], "confirm", i, {"train.lr": 0.01 * (i + 1)}) for i in range(3)]
    records = execute(stack, lab / "runs")
    assert {one.state for one in records} == {"failed"}
    for one in records:
        assert one.error is not None
        assert one.error.splitlines()[-1].endswith("deadline of 10 s, at step 3 of 6")
    assert now == [35.0], "none of them is tried again alone"
    assert len({one.started_at for one in records}) == 1, "a stack starts once"


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_what_does_not_fit_on_the_gpu_fails_with_what_it_needed(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = trainer.LockStep.advance

    def full(self: trainer.LockStep, until: int, split: str | None = None) -> None:
        if self.runs[0].state.weights.numel() > small:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total of 79 GiB.")
        train(self, until, split)

    found = planned(lab)
    small = trainer.LockStep(found.tasks["mqar"], [found.job(found.arms[0], "confirm", 0, {}).specs], [1]).layout.width
    monkeypatch.setattr(trainer.LockStep, "advance", full)
    result = run_study_file(write(lab, arms={"wide": STUDY["arms"]["wide"]}), executor="inline")
    assert (result.trials, result.failed) == (6, 3)
    needed = "of rule 'comba' at train.batch_size 4: it asked for 3.00 GiB more"
    for failure in result.report.failures:
        assert failure.message.startswith("torch.OutOfMemoryError: out of GPU memory with a single run ")
        assert failure.message.endswith(needed)
    assert result.report.to_markdown().count(needed) == 3
    assert {row.arm: row.verdict for row in result.report.tables[0].rows} == {"base": "base", "wide": "failed"}


def test_who_is_parted_waits_alone(lab: Path, store: Store) -> None:
    one = schedule(planned(lab, arms={}, resources={"stack": 3}), store)
    stack = one.next(places=1)
    assert len(stack) == 3
    one.part(stack)
    parted = [one.next(places=1) for _ in range(4)]
    assert [names(each) for each in parted] == [[place] for place in names(stack)] + [[]]


def test_a_stack_that_is_lost_runs_again_as_it_was_and_others_meanwhile(
    lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now[0])
    one = schedule(planned(lab, arms={}, resources={"stack": 2}), store)
    stack = one.next(places=1)
    one.unfinished(stack, Lost("a trace\nthe node is gone", "infrastructure"))
    (other,) = one.next(places=1)
    one.finished(record(other))
    assert (one.next(places=1), one.ended) == ([], False)
    for pause in (1, 5, 25):
        now[0] += 0.9 * pause
        assert one.next(places=1) == []
        now[0] += 0.2 * pause
        assert one.next(places=1) == stack
        assert one.next(places=1) == []
        assert not one.ended
        one.unfinished(stack, Lost("the node is gone again", "infrastructure"))
    assert one.missing == dict.fromkeys((job.key for job in stack), "the node is gone again")
    assert (one.next(places=1), one.ended, one.done) == ([], True, False)
    assert store.known_trials(job.key for job in stack) == {}
    again = schedule(planned(lab, arms={}, resources={"stack": 2}), store)
    assert again.next(places=1) == stack


@pytest.mark.parametrize(("retries", "pauses"), [(0, []), (1, [1]), (6, [1, 5, 25, 60, 60, 60])])
def test_a_study_says_how_often_a_lost_stack_runs_again(
    lab: Path, store: Store, monkeypatch: pytest.MonkeyPatch, retries: int, pauses: list[float]
) -> None:
    now = [0.0]
    monkeypatch.setattr(scheduling.time, "monotonic", lambda: now[0])
    one = schedule(planned(lab, arms={}, tune=None, retries=retries), store)
    (job,) = one.next(places=1)
    for pause in pauses:
        one.unfinished([job], Lost("the disk is full", "infrastructure"))
        now[0] += pause - 0.1
        assert one.next(places=1) == []
        now[0] += 0.2
        assert one.next(places=1) == [job]
    one.unfinished([job], Lost("the disk is full", "infrastructure"))
    tries = "1 try" if retries == 0 else f"{retries + 1} tries"
    assert one.missing == {job.key: "the disk is full"}
    assert one.given_up[0].endswith(f": given up after {tries}: the disk is full")


def test_losses_at_one_step_are_the_rule_s_if_no_other_loss_lies_between(lab: Path, store: Store) -> None:
    one = schedule(planned(lab, arms={}, resources={"stack": 2}, retries=20), store)
    stack = one.next(places=1)
    for at in ("step 3", "step 3", None, "step 3", "step 3", "step 4", "step 3", "step 3", "step 3"):
        one.unfinished(stack, Lost("killed", "infrastructure", at))
        assert not one.missing
        one._again.clear()
        one._out.update(job.key for job in stack)
    one.unfinished(stack, Lost("killed", "infrastructure", "step 3"))
    (first,) = one.next(places=1)
    assert first in stack, "each trial of the stack runs alone"
    for _ in range(4):
        one.unfinished([first], Lost("killed", "infrastructure", "step 3"))
    (failed,) = [row for row in store.trials(one.study_id) if row.state == "failed"]
    assert failed.key == first.key
    assert failed.error == "killed, 4 times in a row, so that the rule or the task is at fault"


def test_a_clock_that_jumps_changes_no_time_of_a_trial(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ten years back at each look, and by as much forth."""
    plan = planned(lab, arms={}, tune=None)
    job = plan.job(plan.arms[0], "confirm", 0, {})
    for years in (-10, 10):
        day = itertools.count(1.7e9, years * 365 * 86400.0)
        monkeypatch.setattr(trials.time, "time", lambda day=day: next(day))
        (one,) = execute([job], lab / f"runs{years}")
        assert 0 < one.seconds < 600
        assert 0 <= one.finished_at - one.started_at < 600


def test_who_is_lost_by_its_own_fault_fails_alone(lab: Path, store: Store) -> None:
    one = schedule(planned(lab, arms={}, resources={"stack": 3}), store)
    one.unfinished(one.next(places=1), Lost("os._exit(1)", "trial"))
    guilty, *others = [one.next(places=1) for _ in range(3)]
    one.unfinished(guilty, Lost("os._exit(1)", "trial"))
    for (job,) in others:
        one.finished(record(job))
    assert (one.next(places=1), one.done) == ([], True)
    states = {row.number: (row.state, row.error) for row in store.trials(one.study_id)}
    assert states == {0: ("failed", "os._exit(1)"), 1: ("done", None), 2: ("done", None)}


# A driver that is killed.


def test_a_stack_that_was_cut_off_goes_on_from_its_checkpoint(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(lab, **choices(0.01, 0.02, 0.03))
    whole = run_study_file(file, db=lab / "whole.db", executor="inline", storage=str(lab / "whole"))
    steps: list[int] = []

    def impatient(*args: Any, **given: Any) -> Any:
        return train_together(*args, **given, checkpoint_seconds=0)

    def until(last: int) -> Callable[..., list[TrialRecord]]:
        def cut(worker: Worker, stack: Sequence[Job], *_: Any) -> list[TrialRecord]:
            def watch(step: int) -> None:
                steps.append(step)
                if step == last:
                    raise KeyboardInterrupt

            return execute(stack, worker.runs, watch=watch)

        return cut

    monkeypatch.setattr(trials, "train_together", impatient)
    monkeypatch.setattr(Worker, "execute", until(4))
    with pytest.raises(KeyboardInterrupt):
        run_study_file(file, executor="inline")
    (left,) = interrupted_stacks_in(lab / "runs")
    assert len(left) == 3
    monkeypatch.setattr(Worker, "execute", until(99))
    steps.clear()
    # It goes on together even where trials would by now be shared out otherwise.
    changed = write(lab, **{**choices(0.01, 0.02, 0.03), "resources": {}})
    result = run_study_file(changed, executor="inline")
    assert steps == [6]
    assert result.failed == whole.failed == 0
    assert ledger(lab / "whole.db") == ledger(lab / "deltalab.db")
    assert interrupted_stacks_in(lab / "runs") == []
    assert not list((lab / "runs" / "checkpoints").glob("*"))


def test_what_is_left_of_a_stack_goes_on_as_it_can(lab: Path, store: Store) -> None:
    found = planned(lab, arms={}, resources={"stack": 2})
    one = schedule(found, store)
    stack = one.next(places=1)
    keys = tuple(job.key for job in stack)
    one.finished(record(stack[0]))
    rest = schedule(found, store, [keys])
    assert [names(rest.next(places=1)) for _ in range(2)] == [[("base", 1), ("base", 2)], []]


def test_the_plan_says_how_many_trials_train_as_one(lab: Path) -> None:
    small = {"arms": {}, "tune": None}
    stacks = [
        estimate(planned(lab, **small, resources=resources)).stack
        for resources in ({}, {"stack": 4}, {"gpu": 1}, {"gpu": 1, "stack": 1})
    ]
    assert stacks == ["auto", 4, "auto", 1]


# Several GPUs, and workers that die.


def test_trials_that_take_no_gpu_train_on_cpus(lab: Path) -> None:
    def device(gpu: float, **train: str) -> str:
        base = {**STUDY["base"], "train": {**STUDY["base"]["train"], **train}}
        found = planned(lab, base=base, arms={}, resources={"gpu": gpu})
        job = found.job(found.arms[0], "confirm", 0, {})
        assert job.config["train"]["device"] == train.get("device", "auto"), "a trial is the same one wherever it runs"
        return job.specs[1].device

    assert [device(1), device(0.5), device(0), device(1, device="cpu")] == ["auto", "auto", "cpu", "cpu"]


def test_a_gpu_that_torch_cannot_use_is_not_a_cpu(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = planned(lab, resources={"gpu": 1})
    (failed,) = execute([found.job(found.arms[0], "confirm", 0, {})], lab)
    assert failed.error is not None
    assert failed.error.splitlines()[-1].endswith("resources.gpu: the worker was given a GPU that torch cannot use")


def test_gpus_that_no_stack_takes_are_told_of(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from deltalab.study.running.ray import driver as ray_driver

    class Started(Exception):
        pass

    class Ray:
        machines: ClassVar = [{"CPU": 1.0, "GPU": 1.0, "memory": 1.0}, {"CPU": 1.0, "GPU": 1.0, "memory": 1.0}]

        def send(self, message: dict[str, Any]) -> None:
            raise Started

    monkeypatch.setattr(ray_driver, "_started", lambda address, folder: nullcontext(Ray()))
    for gpu in (1, 0):
        assert not caplog.records
        with pytest.raises(Started):
            run_study_file(write(lab, resources={"gpu": gpu}), address="a:1", storage=str(lab))
    assert "there are 2: resources: {gpu: 1} gives each stack one" in caplog.text


MEETS = """\
Path(os.environ["CUDA_VISIBLE_DEVICES"]).with_suffix(".here").touch()
until = time.time() + 90
while len(list(Path().glob("*.here"))) < 4 and time.time() < until: time.sleep(0.05)
assert len(list(Path().glob("*.here"))) == 4"""
DIES = """\
if Path("deadly").exists():
    Path("deadly").unlink()
    os._exit(9)"""


def plug_in(lab: Path, trouble: str) -> None:
    file = lab / "rule.py"
    file.write_text(delta_rule("rule_of_a_stack", f"if IN_CHILD:\n{indent(trouble, '    ')}"))
    registry.add_plugin(file)


def own_rule(**more: Any) -> dict[str, Any]:
    return {"base": {**STUDY["base"], "rule": "rule_of_a_stack"}, "arms": {}, **more}


@pytest.mark.slow
def test_on_four_gpus_four_stacks_run_at_once(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four that are given out, on a machine without any: each worker waits until there is one on each."""
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"CPU": 4, "GPU": 4}')
    plug_in(lab, MEETS)
    given = own_rule(tune={"trials": 8, "train.lr": LR}, resources={"cpu": 1, "gpu": 1})
    given["base"]["train"] = {**STUDY["base"]["train"], "device": "cpu"}
    file = write(lab, **given)
    result = run_study_file(file, db=lab / "ray.db")
    assert (result.trials, result.failed) == (8, 0)
    with Store.open(lab / "ray.db") as store:
        began = {row.started_at for row in store.trials(result.study_id)}
    assert len(began) == 4, "eight trials in four stacks of two"


@pytest.mark.slow
def test_a_worker_that_dies_with_a_stack_takes_none_of_its_trials_along(lab: Path) -> None:
    plug_in(lab, DIES)
    (lab / "deadly").touch()
    file = write(lab, **own_rule(**{**choices(0.01, 0.02), "arms": {"heads": {"model": {"heads": 4}}}}))
    result = run_study_file(file)
    assert not (lab / "deadly").exists()
    assert (result.trials, result.failed) == (4, 0)
