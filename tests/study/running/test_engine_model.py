"""Any order of issuing, finishing, failing and losing trials, of kills and failing databases, ends in one ledger.

Hypothesis drives `Schedule` and `Store` and shrinks what breaks them. The model is a set: the keys that were recorded.
"""

import hashlib
import logging
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.chaos.answer import answer, differences
from tests.chaos.faults import When, failing
from tests.support.schedules import ARMS, LOOKS, LR, MQAR, SEARCH, STUDY, figures, record

from deltalab.errors import InputError
from deltalab.store import Store, TrialRecord, drivers, outage
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.running import schedule as scheduling
from deltalab.study.running.run import arm_records
from deltalab.study.running.schedule import Schedule
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.train_stack import failed

BASE = {**STUDY, "resources": {"cpu": 1}}
NARROW = {"model.d_model": {"integers": [16, 24]}, "model.heads": {"choice": [1, 2]}}
BLOCKS = {"model.block": {"choice": ["transformer", "mamba"]}, "model.mlp": {"choice": [True, False]}, "train.lr": LR}
STUDIES: dict[str, dict[str, Any]] = {
    "tuned": {"ablate": ["d", "b"], "tune": {"trials": 3, "train.lr": LR}},
    "shared": {"tune": {"trials": 6, **BLOCKS}},
    "extended": {"ablate": ["d"], "tune": {"trials": 3, "train.lr": LR, "extend": True}},
    "infeasible": {"ablate": ["d"], "tune": {"trials": 4, **NARROW}},
    "looks": {
        "task": {"looked": {"task": "mqar", **MQAR}},
        "arms": ARMS,
        "tune": {"trials": 2, "train.lr": LR},
        "seeds": LOOKS,
    },
    "searched": {"search": {**SEARCH, "trials": 6, "finalists": 2}},
}


@cache
def plan(name: str) -> Plan:
    return make_plan(load_study({**BASE, **STUDIES[name], "name": name}))


@cache
def empty() -> Path:
    """A ledger without a study, to be copied: its tables take a while to make."""
    file = Path(tempfile.mkdtemp()) / "empty.db"
    Store.open(file).close()
    return file


def fresh() -> Path:
    file = Path(tempfile.mkdtemp()) / "lab.db"
    shutil.copy(empty(), file)
    return file


def begun(found: Plan, store: Store) -> int:
    spec = found.spec.model_dump(mode="json")
    return store.begin_study(found.spec.name, found.profile, found.identity, spec, arm_records(found), {})


def computed(job: Job) -> TrialRecord:
    """What a trial comes to, a function of its key alone: one of eight raises, one seed of eight diverges."""
    drawn = hashlib.sha256(job.key.encode()).digest()
    if drawn[0] < 32:
        return failed(job, "boom")

    def score(job: Job, seed: int) -> float:
        if drawn[1 + seed % 8] < 32:
            return math.nan
        if job.task == "looked":
            return figures(job, seed)
        return 0.3 + drawn[9 + seed % 8] / 1000 - abs(math.log10(job.config["train"]["lr"]) + 1) / 10

    found = record(job, score, flops=100.0 * job.config["model"]["heads"])
    return replace(found, rule=failed(job, "").rule)


@cache
def undisturbed(name: str) -> dict[str, list[str]]:
    """The ledger of a study whose trials ran one after another."""
    file = fresh()
    with Store.open(file) as store:
        one = Schedule(plan(name), store, begun(plan(name), store))
        while not one.done:
            for job in one.next(places=1):
                one.finished(computed(job))
        store.finish_study(one.study_id, "failed" if one.failures else "done")
    return answer(file)


WHEN = st.sampled_from(["statement", "before the commit", "after the commit"])

MOSTLY = st.sampled_from([True, True, True, False])


class Engine(RuleBasedStateMachine):
    """A driver with three places. out: the stacks that are being trained, with the jobs not reported yet."""

    @initialize(name=st.sampled_from(sorted(STUDIES)))
    def begin(self, name: str) -> None:
        self.name, self.file = name, fresh()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(outage, "FIRST_PAUSE", 0.0)
        self.patch.setattr(logging.getLogger("deltalab"), "disabled", True)
        self.now = 0.0
        self.patch.setattr(scheduling, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.recorded: set[str] = set()
        self.start([])

    def start(self, cut_off: list[tuple[str, ...]]) -> None:
        self.store = Store.open(self.file)
        self.schedule = Schedule(plan(self.name), self.store, begun(plan(self.name), self.store), cut_off)
        self.out: list[list[Job]] = []
        self.alone: set[str] = set()

    @precondition(lambda self: len(self.out) < 3)
    @rule()
    def issue(self) -> None:
        stack = self.schedule.next(places=3)
        keys = [job.key for job in stack]
        assert len(set(keys)) == len(keys)
        assert not self.recorded & set(keys), "a trial that the ledger has runs no second time"
        assert not {job.key for other in self.out for job in other} & set(keys), "a trial runs in one place at a time"
        assert len(stack) <= 1 or not self.alone & set(keys)
        assert stack or self.out or self.schedule.ended or self.schedule._again, "something is always to be done"
        if stack:
            self.out.append(stack)

    @precondition(lambda self: self.out)
    @rule(at=st.integers(0, 2), member=st.integers(0, 7))
    def finish_one(self, at: int, member: int) -> None:
        """One record of a stack reaches the ledger."""
        stack = self.out[at % len(self.out)]
        self.finish(stack, stack[member % len(stack)])

    @precondition(lambda self: self.out)
    @rule(at=st.integers(0, 2))
    def finish_stack(self, at: int) -> None:
        stack = self.out[at % len(self.out)]
        for job in list(stack):
            self.finish(stack, job)

    def finish(self, stack: list[Job], job: Job) -> None:
        self.schedule.finished(computed(job))
        self.recorded.add(job.key)
        stack.remove(job)
        self.out = [stack for stack in self.out if stack]

    @precondition(lambda self: any(len(stack) > 1 for stack in self.out))
    @rule()
    def fault_in_a_stack(self) -> None:
        """A trial takes the worker with it: each of the stack runs again, alone."""
        stack = next(stack for stack in self.out if len(stack) > 1)
        self.out.remove(stack)
        self.schedule.unfinished(stack, Lost("os._exit(9)", "trial"))
        self.alone |= {job.key for job in stack}

    @precondition(lambda self: any(len(stack) == 1 and computed(stack[0]).state == "failed" for stack in self.out))
    @rule()
    def fault(self) -> None:
        """A trial that fails takes its worker with it, instead of raising."""
        stack = next(stack for stack in self.out if len(stack) == 1 and computed(stack[0]).state == "failed")
        self.out.remove(stack)
        self.schedule.unfinished(stack, Lost("SIGSEGV", "trial"))
        self.recorded.add(stack[0].key)

    @precondition(lambda self: self.out)
    @rule(at=st.integers(0, 2))
    def lose(self, at: int) -> None:
        """The worker's machine is gone. After three more losses the stack's trials are missing."""
        stack = self.out.pop(at % len(self.out))
        self.schedule.unfinished(stack, Lost("gone", "infrastructure"))

    @precondition(lambda self: self.out)
    @rule(at=st.integers(0, 2))
    def withdraw(self, at: int) -> None:
        """The joined driver that should run a stack has left before it began."""
        self.schedule.returned(self.out.pop(at % len(self.out)))

    @rule(seconds=st.sampled_from([0.5, 1, 5, 25]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(how=st.sampled_from(["kill", "kill with checkpoints", "take over", "retry what failed"]))
    def start_again(self, how: str) -> None:
        """One rule for all, so that there are long stretches without."""
        if how == "take over":
            self.take_over()
        elif how == "retry what failed":
            self.retry_what_failed()
        else:
            self.kill(checkpoints=how != "kill")

    def kill(self, checkpoints: bool) -> None:
        """The driver and its workers are gone; the same command goes on, with what checkpoints say or without."""
        assert set(self.store.known_trials(self.recorded)) == self.recorded
        self.store.close()
        self.start([tuple(job.key for job in stack) for stack in self.out if len(stack) > 1] if checkpoints else [])

    @precondition(lambda self: self.out)
    @rule(when=WHEN, at=st.integers(0, 8), waits=MOSTLY)
    def outage_at_a_record(self, when: When, at: int, waits: bool) -> None:
        self.outage(when, at, waits, lambda: self.finish(self.out[0], self.out[0][0]))

    @rule(when=WHEN, at=st.integers(0, 8), waits=MOSTLY)
    def outage_at_a_look(self, when: When, at: int, waits: bool) -> None:
        self.outage(when, at, waits, self.schedule.refresh)

    def outage(self, when: When, at: int, waits: bool, call: Callable[[], None]) -> None:
        """The database fails. A driver that waits for it notices nothing; one that does not ends, and starts again."""
        self.store.patience.seconds = 60.0 if waits else 0.0
        with failing(self.store, when, at):
            try:
                call()
                return
            except InputError:
                assert not waits
        self.kill(checkpoints=True)

    def take_over(self) -> None:
        """Another driver takes the study over from one that stands still; when that goes on, it can write nothing."""
        store, schedule, out = self.store, self.schedule, self.out
        drivers.HERE.clear()
        self.start([])
        before = answer(self.file)
        for stack in out:
            with pytest.raises(drivers.TakenOver):
                schedule.finished(computed(stack[0]))
        store.finish_study(schedule.study_id, "interrupted")
        assert answer(self.file) == before
        store.close()

    def retry_what_failed(self) -> None:
        """`study run --retry-failed` after a kill."""
        self.kill(checkpoints=False)
        one = self.schedule
        for key in {row.key for row in self.store.trials(one.study_id) if row.state == "failed"}:
            self.store.forget_trial(key)
            self.recorded.discard(key)

    def teardown(self) -> None:
        """Whatever happened, the rest runs and gives the undisturbed answer."""
        if not hasattr(self, "schedule"):
            return
        while not self.schedule.done:
            self.now += 25
            self.issue()
            if not self.out and self.schedule.ended and not self.schedule.done:
                assert self.schedule.missing.keys().isdisjoint(self.recorded)
                assert self.schedule.missing, "a study that ended before it was done says what is missing"
                self.kill(checkpoints=False)  # `study run` goes on from there
            while self.out:
                self.finish_stack(0)
        one = self.schedule
        assert one.completed == one.total
        self.store.finish_study(one.study_id, "failed" if one.failures else "done")
        self.store.close()
        found = answer(self.file)
        assert found == undisturbed(self.name), differences(undisturbed(self.name), found)
        shutil.rmtree(self.file.parent)
        self.patch.undo()


Engine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
TestEngine = Engine.TestCase
