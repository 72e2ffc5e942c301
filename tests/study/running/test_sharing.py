"""Several drivers of one study: no trial twice, whoever dies."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.drivers import TEN, Executed, Second, until
from tests.support.records import begin
from tests.support.studies import assert_ledger_is_of, ledger, measured, planned, write

from deltalab.errors import InputError
from deltalab.store import Store, drivers
from deltalab.store.models import Driver
from deltalab.store.studies import queue
from deltalab.study.running import sharing
from deltalab.study.running.activity import DriverActivity
from deltalab.study.running.progress_bars import ProgressBars
from deltalab.study.running.run import arm_records, provenance, run_study_file
from deltalab.study.running.schedule import Schedule
from deltalab.study.running.sharing import DriverWatch, JoinedStacks, Sharing, weights_folder
from deltalab.study.workers.jobs import Lost


@pytest.fixture
def store(any_store: Store) -> Store:
    """An empty ledger of either kind."""
    return any_store


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "POLL_SECONDS", 0.01)


def test_a_driver_that_joins_takes_its_share_and_no_trial_runs_twice(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executed = Executed(monkeypatch)
    file = write(lab / "s.yaml", **TEN)
    alone = run_study_file(file, db=lab / "alone.db", executor="inline")
    executed.by.clear()
    second: list[Second] = []

    def wait() -> None:
        if not second:
            second.append(Second(file, db=lab / "deltalab.db", join=True))
        if threading.current_thread().name != "second":
            until(lambda: executed.count("second") >= min(4, len(executed.by)))

    executed.wait = wait
    first = run_study_file(file, executor="inline")
    joined = second[0].ends()
    assert len(executed.by) == len({key for _, key in executed.by}) == 10
    assert executed.count("second") >= 4
    assert ledger(lab / "deltalab.db") == ledger(lab / "alone.db")
    assert_ledger_is_of(lab / "deltalab.db", planned(file))
    assert repr(first.report.tables) == repr(joined.report.tables) == repr(alone.report.tables)
    assert (first.state, joined.state) == ("done", "done")
    assert (joined.trials, joined.known) == (10, 10 - executed.count("second"))
    assert "takes part in what runs on" in caplog.text
    assert "takes part" in caplog.text
    with Store.open(lab / "deltalab.db") as store:
        assert queue.stacks(store, 1) == queue.joined(store, 1) == []


def test_joining_what_nobody_runs_is_refused_in_one_line(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executed = Executed(monkeypatch)
    file = write(lab / "s.yaml", **TEN)
    with pytest.raises(InputError, match=r"deltalab.db: no such database"):
        run_study_file(file, executor="inline", join=True)
    run_study_file(file, executor="inline")
    with Store.open(lab / "deltalab.db") as store:
        begin_again(store, file)
        store.finish_study(1, "interrupted")
    with pytest.raises(InputError, match=r"--join: nobody runs study 's'; without --join this command does$"):
        run_study_file(file, executor="inline", join=True)

    tried = []

    def wait() -> None:
        if not tried:
            tried.append(True)
            with pytest.raises(InputError, match=r"'s' runs, but with other settings, .* than .*s\.yaml"):
                run_study_file(file, executor="inline", join=True)

    executed.wait = wait
    run_study_file(write(lab / "t.yaml", **{**TEN, "seeds": 3}), executor="inline")
    assert tried


def begin_again(store: Store, file: Path) -> None:
    plan = planned(file)
    store.begin_study(
        "s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan), provenance(plan, {})
    )


def test_joining_a_study_that_has_ended_says_so_and_has_its_result(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executed = Executed(monkeypatch)
    file = write(lab / "s.yaml", **TEN)
    first = run_study_file(file, executor="inline")
    executed.by.clear()
    joined = run_study_file(file, executor="inline", join=True)
    assert (joined.state, joined.trials, joined.known, executed.by) == ("done", 10, 10, [])
    assert repr(joined.report.tables) == repr(first.report.tables)
    assert "study 's': has ended; nothing is left to take part in" in caplog.text


def test_a_study_that_ends_while_a_driver_that_joins_waits_for_its_heartbeat_has_ended(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(lab / "s.yaml", **TEN)
    run_study_file(file, executor="inline")
    with Store.open(lab / "deltalab.db") as store:
        begin_again(store, file)
        monkeypatch.setattr(drivers, "lives", lambda driver: None)  # as of a driver on another machine
        waits: list[float] = []

        def end(seconds: float) -> None:
            waits.append(seconds)
            store.finish_study(1, "done")

        monkeypatch.setattr(sharing.time, "sleep", end)
        assert run_study_file(file, executor="inline", join=True).state == "done"
    assert len(waits) == 1
    assert "has ended" in caplog.text


@pytest.fixture
def held(lab: Path) -> Iterator[tuple[Sharing, Schedule]]:
    """A study of ten trials whose holder gives out stacks only when it is told to `look`."""
    plan = planned(write(lab / "s.yaml", **TEN))
    with Store.open(lab / "deltalab.db") as store:
        study = store.begin_study("s", None, plan.identity, plan.spec.model_dump(mode="json"), arm_records(plan),
                                  {"tasks": {}}, runs=str(lab / "runs"))  # fmt: skip
        schedule = Schedule(plan, store, study)
        yield Sharing(schedule, ProgressBars(schedule, DriverActivity(), quiet=True)), schedule


def test_stacks_of_a_driver_that_died_run_again(held: tuple[Sharing, Schedule], lab: Path) -> None:
    sharing, schedule = held
    with Store.open(lab / "deltalab.db") as store:
        member = queue.Member(schedule.study_id, "dies", str(lab))
        queue.beat(store, member, 2, {}, {})
        sharing.refresh()
        taken = [queue.take(store, member, has) for has in ([], [1])]
        assert None not in taken
        assert queue.take(store, member, [1, 2]) is None, "as many as it has places"
        sharing.refresh()
        drivers.HERE.discard("dies")
        for _ in range(3):  # drops the driver, withdraws its stacks, and finds them withdrawn
            sharing.refresh()
        assert queue.stacks(store, schedule.study_id) == queue.joined(store, schedule.study_id) == []
        assert not queue.deliver(store, member, 1, records="[]"), "too late"
    while stack := schedule.next(1):
        for job in stack:
            schedule.finished(measured(job))
    assert schedule.done
    assert schedule.completed == 10


def test_what_a_joined_driver_cannot_finish_goes_back_to_the_holder(
    held: tuple[Sharing, Schedule], lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing, schedule = held
    back: list[tuple[list[str], str, str]] = []
    monkeypatch.setattr(
        schedule,
        "unfinished",
        lambda stack, lost: back.append(([job.key for job in stack], str(lost), lost.of)),
    )
    with Store.open(lab / "deltalab.db") as store:
        with JoinedStacks(schedule.plan, store, schedule.study_id, lab / "runs") as joined:
            sharing.refresh()
            (stack,) = [joined.next(1)]
            joined.unfinished(stack, Lost("the disk is full", "infrastructure"))
            sharing.refresh()
            assert back == [([job.key for job in stack], "the disk is full", "infrastructure")]
            joined._looked = -1.0
            (other,) = [joined.next(1)]
            joined.unfinished(other, Lost("sys.exit(3)", "trial"))
            sharing.refresh()
        (record,) = store.trials(schedule.study_id)
        assert (record.key, record.state, record.error) == (other[0].key, "failed", "sys.exit(3)")
        assert queue.joined(store, schedule.study_id) == []


def test_a_stack_of_several_that_kills_its_worker_is_parted_where_it_ran(
    held: tuple[Sharing, Schedule], lab: Path
) -> None:
    _, schedule = held
    jobs = schedule.next(1) + schedule.next(1)
    with Store.open(lab / "deltalab.db") as store:
        queue.publish(store, schedule.study_id, sharing.stack_to_json(jobs))
        with JoinedStacks(schedule.plan, store, schedule.study_id, lab / "runs") as joined:
            assert [job.key for job in joined.next(1)] == [job.key for job in jobs]
            joined.unfinished(jobs, Lost("SIGSEGV", "trial"))
            for job in jobs:
                assert joined.next(1) == [job]
                joined.finished(measured(job))
        (entry,) = queue.stacks(store, schedule.study_id)
        assert entry.records is not None
        assert len(json.loads(entry.records)) == 2


def test_a_joined_driver_goes_on_when_the_holder_has_died_and_keeps_what_was_delivered(
    lab: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[Sharing, Schedule], caplog: pytest.LogCaptureFixture
) -> None:
    sharing, schedule = held
    executed = Executed(monkeypatch)
    second = Second(lab / "s.yaml", db=lab / "deltalab.db", join=True)
    until(lambda: sharing.refresh() or executed.by)
    until(lambda: any(entry.records for entry in queue.stacks(schedule.store, schedule.study_id)))
    schedule.store.close()
    result = second.ends()
    assert (result.state, result.trials) == ("done", 10)
    assert len(executed.by) == len({key for _, key in executed.by}) == 10
    assert "is gone; this one goes on in its place" in caplog.text
    assert_ledger_is_of(lab / "deltalab.db", schedule.plan)


def test_who_wants_to_join_a_holder_that_has_died_goes_on_in_its_place(
    lab: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[Sharing, Schedule], caplog: pytest.LogCaptureFixture
) -> None:
    _, schedule = held
    executed = Executed(monkeypatch)
    schedule.store.close()
    result = run_study_file(lab / "s.yaml", db=lab / "deltalab.db", executor="inline", join=True)
    assert (result.state, result.trials, len(executed.by)) == ("done", 10, 10)
    assert "is gone; this one goes on in its place" in caplog.text
    assert_ledger_is_of(lab / "deltalab.db", schedule.plan)


def test_a_joined_driver_ends_with_a_holder_that_was_told_to_stop(
    lab: Path, monkeypatch: pytest.MonkeyPatch, held: tuple[Sharing, Schedule]
) -> None:
    sharing, schedule = held
    executed = Executed(monkeypatch)
    second = Second(lab / "s.yaml", db=lab / "deltalab.db", join=True)
    until(lambda: sharing.refresh() or schedule.completed)
    schedule.store.finish_study(schedule.study_id, "interrupted")
    result = second.ends()
    assert result.state == "interrupted"
    assert len(executed.by) < 10


def test_what_fails_in_the_holders_thread_ends_the_study(held: tuple[Sharing, Schedule]) -> None:
    sharing, schedule = held
    schedule.store.close()
    drivers.HERE.clear()

    def look() -> None:
        raise InputError("the database is gone")

    sharing.refresh = look  # type: ignore[method-assign]
    with sharing:
        until(lambda: schedule.fault)
    with pytest.raises(InputError, match="the database is gone"):
        schedule.next(1)


def test_weights_go_to_the_holders_folder_or_nowhere(held: tuple[Sharing, Schedule], lab: Path) -> None:
    _, schedule = held
    driver = queue.holder(schedule.store, schedule.study_id)
    assert driver is not None
    runs = lab / "runs"
    assert weights_folder(None, driver) == weights_folder(runs, driver) == runs
    with pytest.raises(InputError, match=f"--storage: the study's weights go to {runs}, not to {lab}"):
        weights_folder(lab, driver)
    driver.host = "far"
    assert weights_folder(runs, driver) == runs
    with pytest.raises(InputError, match="the study runs on far: give a folder that both machines see by --storage"):
        weights_folder(None, driver)


def test_a_member_elsewhere_is_gone_when_its_counter_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watched = DriverWatch()
    there = {"id": "x", "host": "far", "machine": "another", "pid": 1, "started": "", "beat_at": 1e12}
    for now, beat, gone in ((0, 1, False), (59, 1, False), (60, 2, False), (119, 2, False), (121, 2, True)):
        assert watched.gone(Driver(beat=beat, **there)) is gone, now


def test_the_queue_gives_each_stack_to_one_and_forgets_no_claim(store: Store) -> None:
    """Each call twice, as after a lost commit."""
    study = begin(store)
    first, second = (queue.Member(study, name, "runs") for name in ("first", "second"))
    assert queue.publish(store, study, "[1]") == queue.publish(store, study, "[1]")
    queue.publish(store, study, "[2]")
    taken = queue.take(store, first, [])
    assert taken is not None
    assert queue.take(store, first, []) == taken
    other = queue.take(store, second, [])
    assert other is not None
    assert {taken[1], other[1]} == {"[1]", "[2]"}
    assert queue.take(store, first, [taken[0]]) is None
    queue.beat(store, first, 3, {taken[0]: 7, other[0]: 9}, {})
    assert {entry.id: entry.step for entry in queue.stacks(store, study)} == {taken[0]: 7, other[0]: 0}
    for _ in range(2):
        assert queue.deliver(store, first, taken[0], records="[]")
    assert not queue.deliver(store, first, other[0], records="[]")
    queue.drop(store, "second")
    queue.withdraw(store, study)
    assert [(entry.id, entry.records) for entry in queue.stacks(store, study)] == [(taken[0], "[]")]
    assert [driver.places for driver in queue.joined(store, study)] == [3]
    store.finish_study(study, "done")
    assert queue.stacks(store, study) == []
