"""Who drives a study: one driver whatever the folder, and nobody waits for one that is gone."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update
from tests.support.records import begin, trial

from deltalab.errors import InputError
from deltalab.store import Busy, Heartbeat, Store, TakenOver, drivers, process
from deltalab.store.models import Driver
from deltalab.store.process import Process
from deltalab.study.running import signals
from deltalab.study.running.run import run_study_file


@pytest.fixture
def store(any_store: Store) -> Store:
    """An empty ledger of either kind."""
    return any_store


def seen_as(study: int, store: Store, **columns: object) -> None:
    """Makes the study's holder another one than it is."""
    with store._writing() as session:
        session.execute(update(Driver).where(Driver.study_id == study).values(**columns))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that does nothing."""
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"],
                                stdout=subprocess.PIPE)  # fmt: skip
    assert sleeping.stdout is not None
    sleeping.stdout.readline()
    yield sleeping
    sleeping.kill()
    sleeping.wait()


def of(pid: int) -> Process:
    started = process._started(pid)
    assert started
    return replace(Process.here(), pid=pid, started=started)


def test_a_process_lives_until_it_is_killed_also_if_nobody_has_noticed(child: subprocess.Popen[bytes]) -> None:
    there = of(child.pid)
    assert Process.here().lives
    assert there.lives
    assert replace(there, started="1").lives is False, "a later process with the same number"
    assert replace(there, machine="another").lives is None
    child.kill()
    until = time.monotonic() + 10
    while there.lives and time.monotonic() < until:
        time.sleep(0.01)
    assert there.lives is False, "a zombie"
    child.wait()
    assert there.lives is False


def test_a_second_driver_is_refused_with_the_place_of_the_first(url: str, store: Store) -> None:
    study = begin(store)
    with Store.open(url) as second:
        with pytest.raises(Busy, match=f"'study' is running already, on {socket.gethostname()}, process {os.getpid()}"):
            begin(second, provenance={"git": "2"})
        assert second.study(study).state == "running"
        assert second.study(study).provenance == {"git": "1"}
        assert begin(second, "other") != study
        store.finish_study(study, "done")
        assert begin(second) == study


def test_a_driver_of_this_machine_that_is_gone_is_taken_over_at_once_with_a_word(
    url: str, store: Store, child: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    study = begin(store)
    there = of(child.pid)
    seen_as(study, store, pid=there.pid, started=there.started, beat_at=0.0)
    with Store.open(url) as second:
        assert second.study(study).state == "running", "however long ago its last heartbeat was: it may be stopped"
        with pytest.raises(Busy, match=f"process {child.pid}"):
            begin(second)
        child.kill()
        child.wait()
        assert [found.state for found in second.studies()] == [second.study(study).state] == ["interrupted"]
        assert begin(second) == study
        assert f"took over from a driver that is gone, on {socket.gethostname()}, process {child.pid}" in caplog.text
        assert second.study(study).state == "running"


def test_a_driver_that_closed_its_ledger_is_gone(url: str, store: Store) -> None:
    with Store.open(url) as first:
        study = begin(first)
        assert store.study(study).state == "running"
    assert store.study(study).state == "interrupted"
    assert begin(store) == study


def test_a_study_of_an_older_version_that_was_killed_does_not_run(store: Store) -> None:
    study = begin(store)
    with store._writing() as session:
        session.delete(session.get_one(Driver, store._claims[study]))
    assert store.study(study).state == "interrupted"


@pytest.mark.slow(keep="sqlite-a clock far ahead")
@pytest.mark.parametrize("clock", [-1e9, 1e9], ids=["a clock far behind", "a clock far ahead"])
def test_a_driver_elsewhere_is_judged_by_its_counter_alone(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, clock: float
) -> None:
    monkeypatch.setattr(drivers, "LEASE_SECONDS", 0.6)
    study = begin(store)
    seen_as(study, store, machine="another", host="far")

    def alive() -> bool:
        beat = store.beat(study, {})
        seen_as(study, store, beat_at=time.time() + clock)
        return beat

    monkeypatch.setattr(drivers, "BEAT_SECONDS", 0.05)
    with Store.open(url) as second:
        with Heartbeat(alive), pytest.raises(Busy, match=f"on far, process {os.getpid()}"):
            begin(second)
        began = time.monotonic()
        assert begin(second) == study
        assert time.monotonic() - began > 0.6
        assert "took over from a driver that is gone, on far" in caplog.text
        assert "watching for up to" in caplog.text


def test_who_lost_the_study_records_nothing_more(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "LEASE_SECONDS", 0.1)
    study = begin(store)
    seen_as(study, store, machine="another")
    with Store.open(url) as second:
        begin(second)
        assert not store.beat(study, {})
        for write in (store.record_trial, store.attach):
            with pytest.raises(TakenOver):
                write(study, "base", trial() if write == store.record_trial else "k", 0, {})
        store.finish_study(study, "interrupted")
        assert second.study(study).state == "running"
        assert second.trials(study) == []
        second.record_trial(study, "base", trial(), 0, {})


def test_a_study_elsewhere_is_shown_as_running_while_its_heartbeat_is_young(url: str, store: Store) -> None:
    study = begin(store)
    seen_as(study, store, machine="another")
    assert store.study(study).state == "running"
    with store._reading() as session:
        now = drivers._seconds(session)
    for age in (61.0, -30.0):
        seen_as(study, store, beat_at=now - age)
        assert store.study(study).state == "interrupted"
    assert store.beat(study, {})
    assert store.study(study).state == "running"


def test_a_heartbeat_outlives_a_database_that_is_gone_and_ends_with_the_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "BEAT_SECONDS", 0.001)
    left: list[Callable[[], bool]] = [lambda: False, lambda: True, lambda: 1 // 0, lambda: True]

    def beat() -> bool:
        try:
            return left.pop()()
        except ZeroDivisionError:
            raise InputError("gone") from None

    with Heartbeat(beat) as heartbeat:
        heartbeat._thread.join(10)
        assert not heartbeat._thread.is_alive()
    assert left == []


def stop(*numbers: signal.Signals, ends: bool = True) -> subprocess.CompletedProcess[bytes]:
    """Sends signals to a process that waits in `signals.in_order`, and says what became of it."""
    code = (
        "import time\n"
        "from deltalab.study.running import signals\n"
        "with signals.in_order():\n"
        "    try:\n"
        "        print(flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('in order', flush=True)\n"
        f"        time.sleep({0 if ends else 60})\n"
    )
    waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert waiting.stdout is not None
    waiting.stdout.readline()
    for number in numbers:
        waiting.send_signal(number)
        if len(numbers) > 1 and number == numbers[0]:
            waiting.stdout.readline()
    out, err = waiting.communicate(timeout=30)
    return subprocess.CompletedProcess([], waiting.returncode, out, err)


def test_the_first_signal_ends_a_driver_in_order_and_a_second_one_at_once() -> None:
    first = stop(signal.SIGTERM)
    assert (first.returncode, first.stdout, first.stderr) == (143, b"in order\n", b"")
    assert b"KeyboardInterrupt" in stop(signal.SIGINT).stderr
    for second, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        at_once = stop(signal.SIGINT, second, ends=False)
        assert (at_once.returncode, at_once.stderr) == (code, b"")


def test_a_driver_under_nohup_goes_on_when_the_terminal_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    handled = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handled.append(number))
    with signals.in_order():
        assert signal.SIGHUP not in handled
        assert signal.SIGQUIT in handled


def ray_like(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A process with a log open in the folder, which looks like one of Ray's where its name begins with "ray::"."""
    with (folder / "log").open("a") as log:
        return subprocess.Popen([name, "-c", "import time; time.sleep(600)"], executable=sys.executable, stderr=log)


def test_a_temporary_folder_that_there_is_not_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "none"))
    with pytest.raises(InputError, match=f"RAY_TMPDIR: there is no folder {tmp_path / 'none'}"):
        run_study_file("comba_ablation", db=tmp_path / "lab.db")
    assert not any(tmp_path.iterdir())


def test_the_next_run_removes_what_killed_drivers_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    import json
    from dataclasses import asdict

    from deltalab.study.running.ray.folders import OWNER, PREFIX, ray_folder

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    owners = {
        "dead": replace(of(child.pid), started="1"),
        "alive": of(child.pid),
        "elsewhere": replace(of(child.pid), machine="another"),
    }
    for name, owner in owners.items():
        (tmp_path / f"{PREFIX}{name}" / "session").mkdir(parents=True)
        (tmp_path / f"{PREFIX}{name}" / OWNER).write_text(json.dumps(asdict(owner)))
    (tmp_path / f"{PREFIX}foreign").mkdir()
    (tmp_path / f"{PREFIX}foreign" / OWNER).write_text("[]")
    (tmp_path / "ray").mkdir()
    agents = [ray_like(tmp_path / f"{PREFIX}{name}", "ray::Agent") for name in ("dead", "alive")]
    reader = ray_like(tmp_path / f"{PREFIX}dead", "less")
    try:
        with ray_folder() as folder:
            assert folder.stat().st_mode & 0o777 == 0o700
            assert agents[0].wait(10) == -signal.SIGKILL
            left = {path.name for path in tmp_path.iterdir()}
            assert left == {folder.name, "ray", *(f"{PREFIX}{name}" for name in ("alive", "elsewhere", "foreign"))}
        assert not folder.exists()
        assert agents[1].poll() is None
        assert reader.poll() is None
    finally:
        for started in (*agents, reader):
            with suppress(ProcessLookupError):
                started.kill()
            started.wait()
