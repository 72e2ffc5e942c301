"""A driver that dies is started again, within bounds, and one that is told to stop is not."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deltalab.cli.machine_commands import supervisor
from deltalab.store import Store

DIES_TWICE = """
import os, signal, sys
from pathlib import Path
count = Path("count")
deaths = int(count.read_text()) if count.exists() else 0
count.write_text(str(deaths + 1))
assert sys.argv[1:] == ["study", "run", "s.yaml"], sys.argv
if deaths < {times}:
    os.kill(os.getpid(), signal.{name})
sys.exit({code})
"""


@pytest.fixture
def dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the command is a script that dies some times."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "PAUSES", (0.0, 0.0))
    return tmp_path


def supervised(monkeypatch: pytest.MonkeyPatch, times: int, code: int, name: str = "SIGKILL") -> int:
    start = "import json, sys; sys.argv[:] = sys.argv[2:]\n" + DIES_TWICE.format(times=times, code=code, name=name)
    monkeypatch.setattr(supervisor, "_START", start)
    return supervisor.supervise(["study", "run", "s.yaml"])


@pytest.mark.parametrize(("times", "code"), [(0, 0), (2, 0), (2, 1), (5, 2)])
def test_a_process_that_dies_starts_again_and_its_exit_code_counts(
    dies: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: int, code: int
) -> None:
    assert supervised(monkeypatch, times, code) == code
    assert (dies / "count").read_text() == str(times + 1)
    assert capsys.readouterr().err.count("the driver was ended by SIGKILL; it starts again in 0 s") == times
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_process_that_dies_too_often_is_given_up(dies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(supervisor.GivenUp, match="died 6 times within an hour, at last by SIGSEGV") as given_up:
        supervised(monkeypatch, 100, 0, "SIGSEGV")
    assert given_up.value.exit_code == 1
    assert (dies / "count").read_text() == "6"


def test_deaths_of_long_ago_do_not_count(dies: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "WITHIN", 0.0)
    assert supervised(monkeypatch, 8, 0) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_killed_driver_goes_on_and_a_signal_to_the_supervisor_ends_it_in_order(
    here: Path, number: signal.Signals, code: int
) -> None:
    study = (here / "study.yaml").read_text().replace("steps: 4", "steps: 200000")
    (here / "study.yaml").write_text(study)
    (here / "typing.py").write_text("raise SystemExit('a file of the working folder ran')")
    words = ["study", "run", "study.yaml", "--executor", "inline", "--supervise"]
    start = (
        f"import sys; sys.path[:] = {sys.path!r}; sys.argv[1:] = {words!r}\nfrom deltalab.cli.app import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", start], cwd=here, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            first = driver_of(here, running)
            os.kill(first, signal.SIGKILL)
            second = driver_of(here, running, but=first)
            running.send_signal(number)
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == code, said
    assert "the driver was ended by SIGKILL; it starts again in 1 s" in said
    assert said.count("interrupted: the same command goes on from here") == 1
    assert not Path(f"/proc/{second}").exists()
    with Store.open(here / "deltalab.db") as store:
        (study_row,) = store.studies()
        assert study_row.state == "interrupted"


def driver_of(folder: Path, supervisor_process: "subprocess.Popen[str]", but: int | None = None) -> int:
    """Waits until the ledger names a driver that runs the study, and returns its process."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert supervisor_process.poll() is None
        if (folder / "deltalab.db").exists():
            try:
                rows = sqlite3.connect(folder / "deltalab.db").execute("SELECT pid FROM driver WHERE holds").fetchall()
            except sqlite3.OperationalError:
                rows = []
            if rows and rows[0][0] != but:
                return int(rows[0][0])
        time.sleep(0.2)
    raise AssertionError("no driver began")
