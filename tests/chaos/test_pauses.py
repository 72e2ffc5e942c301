"""Processes that stand still and clocks that jump: nothing is lost or done twice, nobody writes who must not."""

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.chaos.lab import Lab, Right, end, lab, moment

from deltalab.store.drivers import LEASE_SECONDS

pytestmark = pytest.mark.chaos
INLINE = ("--executor", "inline")


def told(tell: Callable[..., None], kind: str, right: Right, one: Lab, **figures: int) -> None:
    tell(kind, commands=one.commands, **figures, **right.row(one))
    right.demand(one)


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_that_stands_still_for_a_while_costs_time_alone(
    seed: int, right: Right, tell: Callable[..., None]
) -> None:
    rng = random.Random(f"worker stopped {seed}")
    with lab(None, *INLINE) as one:
        process, events = one.start(), 0
        while process.poll() is None and events < 3:
            time.sleep(moment(rng, right) / 3)
            for worker in one.workers():
                end(worker, signal.SIGSTOP)
                time.sleep(rng.uniform(0, 3))
                end(worker, signal.SIGCONT)
                events += 1
        one.finish(process)
        told(tell, "SIGSTOP: worker, then SIGCONT", right, one, seed=seed, events=events)


@pytest.mark.parametrize("seed", range(2))
def test_a_driver_that_stands_still_holds_its_study_on_its_machine(
    seed: int, right: Right, tell: Callable[..., None]
) -> None:
    """A second driver sees that the process is there, and is refused; the first one goes on where it stood."""
    rng = random.Random(f"driver stopped {seed}")
    with lab(None, *INLINE) as one:
        first = one.start()
        one.begun(first)
        time.sleep(rng.uniform(0, 0.3))
        end(first, signal.SIGSTOP)
        second = one.start()
        assert second.wait(timeout=120) == 2, one.log()
        (line,) = one.log().strip().splitlines()
        assert "is running already" in line
        assert f"process {first.pid};" in line
        end(first, signal.SIGCONT)
        one.commands = 1
        one.finish(first)
        told(tell, "SIGSTOP: driver, then SIGCONT", right, one, seed=seed, events=1)


def stop_outside_a_write(one: Lab, process: subprocess.Popen[bytes]) -> None:
    """Stops a driver that holds no lock: one stopped amid a write keeps every other writer out of an SQLite file."""
    while True:
        end(process, signal.SIGSTOP)
        try:
            with closing(sqlite3.connect(one.folder / "lab.db", timeout=2)) as connection:
                connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError:
            end(process, signal.SIGCONT)
            time.sleep(0.1)


def test_a_driver_of_another_machine_that_stands_still_is_replaced_and_writes_no_more(
    right: Right, tell: Callable[..., None]
) -> None:
    """The other machine is a namespace of process ids: from there, nobody can see whether the first driver lives."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make a namespace of process ids")
    with lab(None, *INLINE) as one:
        first = one.start()
        one.begun(first)
        stop_outside_a_write(one, first)
        stopped_at, log = one.recorded(), one.folder / "log0"
        began = time.monotonic()
        second = one.start(before=apart)
        assert second.wait(timeout=LEASE_SECONDS + 240) == 0, one.log()
        assert time.monotonic() - began > LEASE_SECONDS, "a minute without a sign of life"
        assert "took over from a driver that is gone" in one.log()
        whole = one.answer()
        end(first, signal.SIGCONT)
        assert first.wait(timeout=60) == 2, log.read_text()
        assert "another driver has taken the study over" in log.read_text().strip().splitlines()[-1]
        assert "Traceback" not in log.read_text()
        assert one.answer() == whole
        assert stopped_at < one.recorded()
        one.follows()
        told(tell, "SIGSTOP: driver, taken over", right, one, events=1)


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that moves a process's wall clock."""
    compiler = shutil.which("cc") or pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.mark.parametrize("seed", range(4))
def test_a_clock_that_jumps_changes_nothing(seed: int, right: Right, clock: Path, tell: Callable[..., None]) -> None:
    """Forward and back, by seconds to years, every half second; one driver is killed amid it. No deadline strikes."""
    rng = random.Random(f"clock {seed}")
    with lab(None, *INLINE, deadline=3600) as one:
        file = one.folder / "clock"
        file.write_text("0")
        one.environment |= {"LD_PRELOAD": str(clock), "CHAOS_CLOCK": str(file)}
        ended, jumps = threading.Event(), 0

        def jump() -> None:
            nonlocal jumps
            while not ended.wait(0.5):
                size = 10 ** rng.uniform(0, 8.5)
                partial = file.with_suffix(".new")
                partial.write_text(str(int(rng.choice([-1, 1]) * size)))
                os.replace(partial, file)
                jumps += 1

        jumping = threading.Thread(target=jump)
        jumping.start()
        try:
            process = one.start()
            if seed % 2:
                one.begun(process)
                end(process)
                process.wait()
                one.follows()
                process = one.start()
            one.finish(process)
        finally:
            ended.set()
            jumping.join()
        told(tell, "clock: jumps", right, one, seed=seed, events=jumps)
