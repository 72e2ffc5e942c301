"""How far a running study is: what a driver counts, what it writes into the ledger, and what a terminal shows."""

import io
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.support.drivers import TEN, Executed, Second, until
from tests.support.records import begin
from tests.support.studies import STUDY, measured, planned, write

from deltalab.cli import app
from deltalab.errors import InputError
from deltalab.store import Store, drivers
from deltalab.store.studies import queue
from deltalab.store.studies.driver_status import DriverStatus, study_progress
from deltalab.study.running import activity
from deltalab.study.running import progress_bars as terminal
from deltalab.study.running.activity import Count, DriverActivity, Pace
from deltalab.study.running.run import arm_records, run_study_file
from deltalab.study.running.schedule import Schedule
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.train_stack import failed
from deltalab.study.workers.worker import Worker


@pytest.fixture
def store(any_store: Store) -> Store:
    """An empty ledger of either kind."""
    return any_store


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(activity, "time", fake)
    return fake


def stack(name: str, *, seeds: int = 2, steps: int = 100) -> list[Any]:
    """A stack of one trial, whose work is seeds times steps."""
    job = SimpleNamespace(key=name, seeds=tuple(range(seeds)), config={"train": {"steps": steps}}, stage="confirm")
    return [job]


def counts(ended: int, total: int) -> dict[Any, Count]:
    return {"confirm": Count(ended, total, 200.0 * (total - ended))}


def test_the_end_is_unknown_until_something_is_measured(clock: Clock) -> None:
    one = DriverActivity()
    assert one.eta() is None
    one.counted(counts(0, 10), Pace())
    one.started(stack("a"), "a", here=True)
    clock.now += 40  # a process starts, and imports
    assert one.eta() is None
    one.advanced(stack("a"), 1)
    clock.now += 1
    one.advanced(stack("a"), 10)
    assert one.eta() is None, "fewer than a tenth of the steps"
    clock.now += 1
    one.advanced(stack("a"), 21)
    # 20 of 100 steps took 2 s: 10 s a stack, of which nine wait.
    assert one.eta() == pytest.approx(7.9 + 9 * 10)


def test_the_end_follows_from_the_stacks_that_have_ended_and_from_the_places(clock: Clock) -> None:
    one = DriverActivity()
    one.counted(counts(0, 10), Pace())
    one.started(stack("a"), "a", here=True)
    clock.now += 30
    one.ended(stack("a"))
    one.counted(counts(1, 10), Pace(30.0, 200.0))
    assert one.eta() == pytest.approx(9 * 30)
    one.places, one.elsewhere = 2, 1
    assert one.eta() == pytest.approx(9 * 30 / 3)
    one.counted(counts(10, 10), Pace(300.0, 2000.0))
    assert one.eta() == 0


def test_what_is_lost_tells_nothing_of_the_end(clock: Clock) -> None:
    one = DriverActivity()
    one.counted(counts(0, 10), Pace())
    one.started(stack("a"), "a", here=True)
    clock.now += 0.1
    one.ended(stack("a"))
    assert one.eta() is None


def test_the_end_is_no_earlier_than_that_of_a_stack_that_runs(clock: Clock) -> None:
    one = DriverActivity()
    one.places = 8
    one.counted(counts(9, 10), Pace())
    one.started(stack("a"), "a", here=True)
    one.advanced(stack("a"), 1)
    clock.now += 50
    one.advanced(stack("a"), 51)
    assert one.eta() == pytest.approx(49)


def test_a_device_is_busy_while_any_stack_trains_on_it(clock: Clock) -> None:
    one = DriverActivity()
    one.places = 2
    one.counted(counts(0, 4), Pace())
    clock.now += 10
    for name in "ab":
        one.started(stack(name), name, here=True)
    one.advanced(stack("a"), 1, "GPU 0")
    clock.now += 10
    one.ended(stack("a"), "GPU 0")
    clock.now += 10
    one.ended(stack("b"), "GPU 0")  # a stack may say where it trained only when it ends
    clock.now += 10
    (device,) = one.status().devices
    assert (device.name, device.stacks) == ("GPU 0", 0)
    assert device.busy == pytest.approx(20 / 40)
    assert one.status().busy == pytest.approx((10 + 20) / (2 * 40))


def test_a_stack_of_a_driver_that_joined_is_not_this_drivers(clock: Clock) -> None:
    one = DriverActivity()
    one.counted(counts(0, 4), Pace())
    one.started(stack("a"), "a", here=False)
    clock.now += 10
    assert one.status().stacks == one.status().devices == ()
    assert one.status().busy == 0
    one.ended(stack("a"))
    assert one.status().stacks == ()


def test_what_a_driver_does_comes_back_out_of_the_ledger(clock: Clock, store: Store) -> None:
    one = DriverActivity()
    one.counted({"tune": Count(2, 8, 1.0), "confirm": Count(0, 32, 5.0)}, Pace())
    one.started(stack("a"), "mqar / base", here=True)
    clock.now += 5
    one.advanced(stack("a"), 7, "GPU 0")
    study = begin(store)
    assert study_progress(store, [study])[study].line == "starting"
    assert store.beat(study, one.status().to_json())
    found = study_progress(store, [study, 77])
    assert found.keys() == {study}
    assert found[study].drivers == (one.status(),)
    assert found[study].line == "2 of 40 trials, ETA unknown"
    store.finish_study(study, "done", 40)
    assert study_progress(store, [study]) == {}
    assert store.study(study).total == 40


def test_a_driver_that_is_gone_makes_no_progress(store: Store) -> None:
    study = begin(store)
    assert study_progress(store, [study])
    drivers.HERE.clear()
    assert study_progress(store, [study]) == {}


@pytest.mark.parametrize("looks", [6, {"at_least": 6, "at_most": 12}])
def test_a_schedule_counts_its_trials_by_stage(lab: Path, looks: Any) -> None:
    plan = planned(write(lab / "s.yaml", **{**TEN, "seeds": looks}))
    with Store.open(lab / "deltalab.db") as store:
        study = store.begin_study("s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                                  {"tasks": {}}, runs=str(lab / "runs"))  # fmt: skip
        schedule = Schedule(plan, store, study)
        steps = plan.arms[0].config["train"]["steps"]
        seen = schedule.stages()["confirm"]
        assert (seen.ended, seen.total, seen.left) == (0, plan.trials, plan.runs * steps)
        while jobs := schedule.next(1):
            for job in jobs:
                schedule.finished(measured(job))
            left, seen = seen.left, schedule.stages()["confirm"]
            assert seen.left < left
            assert (seen.ended, seen.total) == (schedule.completed, schedule.total)
        seen = schedule.stages()["confirm"]
        assert (seen.ended, seen.left) == (seen.total, 0)


def test_after_a_kill_the_end_follows_from_what_the_ledger_holds(lab: Path, clock: Clock) -> None:
    plan = planned(write(lab / "s.yaml", **TEN))
    with Store.open(lab / "deltalab.db") as store:
        study = store.begin_study("s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                                  {"tasks": {}}, runs=str(lab / "runs"))  # fmt: skip
        killed = Schedule(plan, store, study)
        for _ in range(4):
            (job,) = killed.next(10)
            killed.finished(replace(measured(job), seconds=2.0))
        assert killed.pace().seconds / 4 == 2.0
        again, one = Schedule(plan, store, study), DriverActivity()
        one.counted(again.stages(), again.pace())
        assert one.eta() is None, "it has not looked into the ledger yet"
        (job,) = again.next(10)
        one.started([job], "a", here=True)
        one.counted(again.stages(), again.pace())
        assert one.eta() == pytest.approx(6 * 2.0)
        clock.now += 60  # the process starts
        assert one.eta() == pytest.approx(6 * 2.0)
        again.finished(replace(measured(job), seconds=3.0))
        one.ended([job])
        one.counted(again.stages(), again.pace())
        assert one.eta() == pytest.approx(5 * (3.0 + 3 * 2.0) / 4), "what it took itself counts first"
        for _ in range(3):
            (job,) = again.next(10)
            again.finished(replace(measured(job), seconds=3.0))
        one.counted(again.stages(), again.pace())
        assert one.eta() == pytest.approx(2 * 3.0)
        (job,) = again.next(10)
        again.finished(failed(job, "no"))
        one.counted(again.stages(), again.pace())
        assert one.eta() == pytest.approx(3.0), "what failed tells nothing"


def test_a_running_study_says_how_far_it_is(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two drivers, each with what it does; one trial is lost once."""
    monkeypatch.setattr(drivers, "BEAT_SECONDS", 0.01)
    executed = Executed(monkeypatch)
    file, db = write(lab / "s.yaml", **TEN), lab / "deltalab.db"
    second: list[Second] = []

    seen = threading.Event()

    def wait() -> None:
        if threading.current_thread().name == "second":
            assert seen.wait(60)
        if len(executed.by) < 2 or second:
            return
        second.append(Second(file, db=db, join=True))
        with Store.open(db, create=False) as other:
            until(lambda: [len(driver.stacks) for driver in study_progress(other, [1])[1].drivers][:1] == [1])
            until(lambda: len(queue.joined(other, 1)) == 1 and len(study_progress(other, [1])[1].drivers) == 2)
            found = study_progress(other, [1])[1]
        assert found.line.startswith("2 of 10 trials, ETA ")
        assert found.stages == {"confirm": (2, 10)}
        assert [one.stages for one in found.drivers] == [found.stages, {}]
        (running,) = found.drivers[0].stacks
        assert re.match("(base|without_d), candidate [01], ", running.name)
        assert app._run() == 0
        out, err = capsys.readouterr()
        assert "study 's' runs: 2 of 10 trials, ETA " in err
        assert "runs:" not in out
        seen.set()

    monkeypatch.setattr("sys.argv", ["platform", "study", "report", "s", "--db", str(db), "--csv"])
    executed.wait = wait
    run_study_file(file, executor="inline", quiet=False)
    second[0].ends()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert lines[-1].startswith("[10/10] ")
    assert "ETA" not in lines[-1]
    assert all("ETA " in line for line in lines[:-1])
    with Store.open(db) as after:
        assert after.study(1).total == 10


def test_a_database_that_is_gone_for_the_heartbeat_alone_does_not_touch_the_study(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "BEAT_SECONDS", 0.001)

    def gone(*_: Any) -> bool:
        raise InputError("the database is gone")

    monkeypatch.setattr(Store, "beat", gone)
    Executed(monkeypatch)
    assert run_study_file(write(lab / "s.yaml", **TEN), executor="inline").state == "done"


def test_a_terminal_shows_steps_and_the_end(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(write(lab / "s.yaml", **TEN))
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=160))
    with Store.open(lab / "deltalab.db") as store:
        study = store.begin_study("s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                                  {"tasks": {}}, runs=str(lab / "runs"))  # fmt: skip
        schedule = Schedule(plan, store, study)
        with terminal.ProgressBars(schedule, DriverActivity(), quiet=False) as shown:
            for step in (3, None):
                jobs = schedule.next(1)
                shown.started(jobs)
                shown._bars.refresh()
                if step is not None:
                    assert "ETA unknown" in screen.getvalue()
                    shown.advanced(jobs, step)
                    for job in jobs:
                        schedule.finished(measured(job))
                    shown.finished(jobs)
            shown._bars.refresh()
    assert re.search(r"ETA \d+ s", screen.getvalue())
    assert "1/10" in screen.getvalue()


def test_a_line_says_how_far_a_stack_is_where_none_ends_for_a_minute(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, clock = planned(write(lab / "s.yaml", **TEN)), Clock()
    monkeypatch.setattr(terminal, "time", clock)
    with Store.open(lab / "deltalab.db") as store:
        study = store.begin_study("s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                                  {"tasks": {}}, runs=str(lab / "runs"))  # fmt: skip
        schedule = Schedule(plan, store, study)
        with terminal.ProgressBars(schedule, DriverActivity(), quiet=False) as shown:
            jobs = schedule.next(1)
            shown.started(jobs)
            for step in range(1, 5):
                clock.now += 30
                shown.advanced(jobs, step)
    lines = [re.sub("ETA [^ ]+ ", "", line) for line in capsys.readouterr().err.splitlines()]
    assert [line.split(" s  ")[0] for line in lines] == ["[0/10] 0", "[0/10] 60", "[0/10] 120"]
    name, steps = re.escape(lines[0].split("starts with ")[1]), jobs[0].config["train"]["steps"]
    assert re.fullmatch(rf"\[0/10] 60 s .*1 running, {name} at step 2 of {steps:,}", lines[1])


def test_a_training_that_time_ends_tells_seconds_and_when_it_ends(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps only say how far the schedule is: a third of them is 40 of 120 s."""
    train = {**STUDY["base"]["train"], "steps": 99_000, "seconds": 120}
    plan = planned(write(lab / "s.yaml", base={**STUDY["base"], "train": train}, tune=None, arms={}, seeds=2))
    clock = Clock()
    for module in (terminal, activity):
        monkeypatch.setattr(module, "time", clock)
    with Store.open(lab / "deltalab.db") as store:
        study = store.begin_study("s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                                  {"tasks": {}}, runs=str(lab / "runs"))  # fmt: skip
        schedule, doing = Schedule(plan, store, study), DriverActivity()
        with terminal.ProgressBars(schedule, doing, quiet=False) as shown:
            jobs = schedule.next(1)
            shown.started(jobs)
            shown.advanced(jobs, 1)
            clock.now += 80
            shown.advanced(jobs, 33_000)
            assert (shown._bars.tasks[-1].completed, shown._bars.tasks[-1].total) == (40, 120)
        (running,) = doing.status().stacks
    assert (running.step, running.budget) == (33_000, 120)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f"1 running, {running.name} at 40 of 120 s")
    assert json.loads(json.dumps(doing.status().to_json()))["stacks"][0]["budget"] == 120
    # The two runs of a stack share the time: 160 s are left of this stack, and 240 s are those of the one that waits.
    assert (len(jobs[0].seeds), schedule.total) == (2, 2)
    assert doing.eta() == pytest.approx(400, abs=1)


def test_a_stack_tells_its_step_between_evaluations_and_its_device(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltalab.study.workers.worker.TELLS", 0.0)
    plan = planned(write(lab / "s.yaml", base={**STUDY["base"], "train": {**STUDY["base"]["train"], "steps": 40}}))
    job: Job = plan.job(plan.arms[0], "confirm", 0, {"train.lr": 1e-2})
    seen: list[int] = []
    with Worker(lab / "runs") as place:
        try:
            place.execute([job], seen.append)
        except Lost as lost:
            pytest.fail(str(lost))
        assert place.device is not None
        assert " on " in place.device
    assert set(seen) - {0, job.config["train"]["steps"]}
    assert json.dumps(DriverStatus(1.0, 1, 0.0, (), (), {}, None).to_json())
