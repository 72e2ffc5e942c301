"""Jobs of Slurm: what the user may ask for, what a cluster takes away, and a record that is equal to the inline one."""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_slurm import FakeSlurm
from tests.support.studies import assert_ledger_is_of, ledger, planned, write

from deltalab.cli.app import main
from deltalab.errors import InputError
from deltalab.store.process import Process
from deltalab.study.running.run import run_study_file
from deltalab.study.running.slurm import driver, mailbox, options
from deltalab.study.running.slurm import place as place_module
from deltalab.study.running.slurm.mailbox import Mailbox
from deltalab.study.running.slurm.options import SlurmJobs, read_options
from deltalab.study.specs.study_file import Resources


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """A cluster of this machine, which the driver asks often."""
    pytest.importorskip("submitit")
    cluster = FakeSlurm(tmp_path / "cluster")
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SUBMITIT_PREEMPT_SIGNAL", raising=False)
    monkeypatch.setattr(driver, "ASKS", 0.5)
    yield cluster
    cluster.ends()


def refused(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.setattr("sys.argv", ["deltalab", "study", "run", "s.yaml", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


# What the user may ask for.


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("30", 30), ("90:30", 91), ("1:30:00", 90), ("1-0", 1440), ("1-12", 2160), ("0-2:30", 150), ("2-0:0:30", 2881)],
)
def test_a_time_is_read_in_slurms_notation(text: str, minutes: int) -> None:
    assert read_options([f"time={text}"]).time == minutes


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["time=4h"], "--slurm: time '4h' is no time of Slurm's: give minutes, M:S, H:M:S, D-H, "),
        (["time=-1"], "--slurm: time '-1' is no time"),
        (["time=1:2:3:4"], "--slurm: time '1:2:3:4' is no time"),
        (["time=2"], "--slurm: time must be from 5 minutes to 366 days, not 2"),
        (["time=400-0"], "--slurm: time must be from 5 minutes to 366 days"),
        (["time="], "--slurm: time has no value"),
        (["partitoin=gpu"], "--slurm: unknown key 'partitoin'; did you mean 'partition'? allowed: partition, time, "),
        (["gpu"], "--slurm: 'gpu' is no KEY=VALUE, such as partition=gpu"),
        (["qos=a", "qos=b"], "--slurm: qos is given twice"),
        (["stacks=0"], "--slurm: stacks must be a whole number from 1 to 64, not 0"),
        (["stacks=two"], "--slurm: stacks must be a whole number"),
        (["account=a\nb"], "--slurm: account has no value that can be printed"),
    ],
)
def test_a_wrong_word_is_one_line(words: list[str], line: str) -> None:
    with pytest.raises(InputError) as wrong:
        read_options(words)
    assert str(wrong.value).startswith(line)
    assert "\n" not in str(wrong.value)


def test_a_job_asks_for_what_its_stacks_take() -> None:
    jobs = read_options(["partition=a,b", "stacks=4", "time=4:00:00"])
    asked = jobs.parameters(Resources(cpu=1.5, gpu=0.5, memory=3))
    names = ("partition", "time", "ntasks_per_node", "cpus_per_task", "gpus_per_node", "mem")
    assert [asked[name] for name in names] == ["a,b", 240, 4, 2, 2, 12]
    assert "gpus_per_node" not in SlurmJobs().parameters(Resources())


def test_settings_that_do_not_go_together_are_one_line(
    lab: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(lab / "s.yaml")
    ask: Callable[[str], str] = lambda words: refused(words, monkeypatch, capsys)  # noqa: E731
    on = "--executor slurm --storage runs"
    assert ask("--slurm partition=gpu --executor inline") == "--slurm is for --executor slurm"
    assert ask("--executor slurm --workers 2").endswith(
        "jobs need a folder that all machines see: give it with --storage"
    )
    assert "give it with --storage" in ask("--executor slurm --workers 2 --storage s3://bucket/lab")
    assert ask(on) == "--executor slurm: say with --workers how many stacks run at a time"
    assert ask(f"{on} --workers 2 --slurm stacks=4") == "--slurm: a job has stacks=4 at a time, and --workers is only 2"
    assert ask(f"{on} --workers 2 --address auto") == "--address is of a Ray cluster, and --executor slurm uses none"
    assert ask(f"{on} --workers 2 --slurm partition=gup").startswith(
        "--slurm: unknown partition 'gup'; did you mean 'gpu'? allowed: cpu, gpu"
    )
    assert ask("--executor slrum").startswith("--executor: unknown executor 'slrum'; did you mean 'slurm'?")
    assert slurm.jobs() == {}
    for name in ("sacct", "sbatch"):
        (slurm.bin / name).unlink()
        assert ask(f"{on} --workers 2").startswith(
            f"--executor slurm: no {name} is found on the PATH: give the command"
        )
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert ask(f"{on} --workers 2") == "--executor slurm: needs submitit: pip install 'deltalab[slurm]'"
    assert not (lab / "runs").exists(), "nothing has begun"


def test_what_sbatch_refuses_is_one_line(
    lab: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(lab / "s.yaml")
    (slurm.bin / "sinfo").unlink()  # so that only sbatch knows the partitions
    line = refused("--executor slurm --storage runs --workers 2 --slurm partition=gup", monkeypatch, capsys)
    assert "Invalid partition name specified" in line
    assert list((lab / "runs").glob("slurm/*")) == []


def test_jobs_that_end_before_they_begin_end_the_study_with_what_they_said(
    lab: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slurm.bin / "srun").write_text("#!/bin/sh\necho 'srun: error: no module loaded' >&2; exit 1\n")
    monkeypatch.setattr(driver, "POLL", 0.01)
    lost = (
        r"slurm: 3 jobs in a row ended before they began; Slurm job 103 ended as FAILED: srun: error: no module loaded"
    )
    with pytest.raises(InputError, match=lost):
        run_study_file(write(lab / "s.yaml"), executor="slurm", workers=1, storage=str(lab / "runs"))
    assert list((lab / "runs").glob("slurm/*")) == []


def test_the_next_driver_cancels_the_jobs_of_a_killed_one_and_leaves_those_of_others(
    lab: Path, slurm: FakeSlurm
) -> None:
    script = lab / "script.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --output={lab}/o\n#SBATCH --error={lab}/e\nsleep 600\n")
    here = asdict(Process.here())
    owners = {"dead": {**here, "started": "1"}, "living": here, "far": {**here, "machine": "another"}}
    for name, process in owners.items():
        said = subprocess.run([slurm.bin / "sbatch", script], capture_output=True, text=True, check=True).stdout
        folder = lab / "runs" / "slurm" / name
        folder.mkdir(parents=True)
        mailbox.write(folder / mailbox.OWNER, {"process": process, "beat": 1})
        (folder / f"{said.split()[-1]}_submitted.pkl").touch()
    with driver._driver_folder(lab / "runs") as own:
        assert mailbox.read(own / mailbox.OWNER) is not None
        assert {folder.name for folder in own.parent.iterdir()} == {"living", "far", own.name}
    assert [about["state"].partition(" ")[0] == "CANCELLED" for about in slurm.jobs().values()] == [True, False, False]
    assert {folder.name for folder in own.parent.iterdir()} == {"living", "far"}


# A place, as the driver sees it, and the driver, as a place sees it.


def test_a_place_ends_with_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    folder = tmp_path / "driver"
    folder.mkdir()
    seen = place_module._Driver(folder, 900)
    mailbox.write(folder / mailbox.OWNER, {"process": {}, "beat": 1})
    for now, beat, wants in ((1, 1, True), (800, 1, True), (850, 2, True), (1749, 2, True), (1751, 2, False)):
        mailbox.write(folder / mailbox.OWNER, {"process": {}, "beat": beat})
        assert seen.wants() is wants, now
    mailbox.write(folder / mailbox.OWNER, {"process": {}, "beat": 3})
    assert seen.wants()
    shutil.rmtree(folder)
    assert not seen.wants(), "it has ended"


def test_a_place_takes_no_order_that_was_for_its_job_before_it_came_back(tmp_path: Path) -> None:
    box = Mailbox(tmp_path, "7", 0)
    mailbox.write(box.state, {"life": "a", "end": "left"})
    state = place_module._State(box)
    mailbox.write(box.order, {"number": 1, "life": "a", "stack": "[]"})
    nothing: Any = None
    assert not state.work(nothing, nothing)
    state.tell("warned")
    said = mailbox.read(box.state)
    assert said is not None
    assert (said["before"], said["end"]) == ("a", "warned")


@pytest.fixture
def place(tmp_path: Path) -> tuple[driver._RemotePlace, Callable[..., None]]:
    """A place that has a stack, and a function that writes what the place does."""
    box = Mailbox(tmp_path, "7", 0)
    about = {"life": "a", "host": "far", "beat": 1, "end": None, "before": None, "done": 0, "step": 0, "device": None}

    def says(**changes: Any) -> None:
        about.update(changes, beat=about["beat"] + 1)  # type: ignore[operator]
        mailbox.write(box.state, about)

    remote = driver._RemotePlace(box)
    assert not remote.free, "before its first sign of life"
    says()
    remote.look()
    assert remote.free
    remote.give([])
    assert not remote.free
    return remote, says


Place = tuple[driver._RemotePlace, Callable[..., None]]


@pytest.mark.parametrize(
    ("says", "gone", "warned"),
    [
        ({"step": 3}, False, False),
        ({"end": "warned"}, False, True),
        ({"end": "left"}, True, True),
        ({"life": "b"}, True, False),
        ({"life": "b", "before": "a"}, True, True),
    ],
)
def test_a_place_loses_its_stack_with_its_process_and_without_blame_after_a_warning(
    place: Place, says: dict[str, Any], gone: bool, warned: bool
) -> None:
    remote, write_state = place
    write_state(**says)
    assert remote.look() is None
    assert (remote.gone, remote.warned) == (gone, warned)


def test_a_place_that_is_silent_is_gone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    remote, says = place
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + driver.SILENT + 1)
    assert remote.gone
    says()
    remote.look()
    assert not remote.gone


def test_a_result_counts_also_if_its_process_has_ended_and_a_file_is_not_there_yet(
    place: Place, tmp_path: Path
) -> None:
    remote, says = place
    says(done=1)
    assert remote.look() is None, "a file server shows the state before the result"
    mailbox.write(Mailbox(tmp_path, "7", 0).result(1), {"records": []})
    says(life="b", done=0)
    assert remote.look() == {"records": []}


# What a cluster takes away.


class Strikes:
    """Does one thing after another to jobs that have a stack, from a thread.

    Attributes:
        hit: The jobs that were struck.
    """

    def __init__(self, folder: Path, *strikes: Callable[[str], None]) -> None:
        self.hit: list[str] = []
        self._folder, self._strikes, self._lives = folder, strikes, set[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Strikes":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)

    def _run(self) -> None:
        for strike in self._strikes:
            while not (training := self._training()):
                if self._over.wait(0.05):
                    return
            self.hit.append(training)
            strike(training)

    def _training(self) -> str | None:
        """A job whose process has a stack, and was not struck."""
        for file in self._folder.glob("slurm/*/*.order.json"):
            box = Mailbox(file.parent, file.name.partition("-")[0], 0)
            order, state = mailbox.read(box.order), mailbox.read(box.state)
            if not (order and state) or state["life"] in self._lives:
                continue
            if order["life"] == state["life"] and order["number"] > state["done"]:
                self._lives.add(state["life"])
                return box.name.partition("-")[0]
        return None


LONG = {
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "mlp": False, "chunk_size": 16},
        "train": {"steps": 300, "batch_size": 4, "lr": 0.01, "evaluations": 60, "eval_batches": 1},
    },
    "resources": {"stack": 1},
}


@pytest.mark.slow
def test_the_record_is_the_inline_one_whatever_slurm_takes_away(
    lab: Path, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(lab / "s.yaml", **LONG)
    alone = run_study_file(file, db=lab / "alone.db", storage=str(lab / "alone"), executor="inline")
    shared = lab / "shared"
    with Strikes(shared, slurm.announces, slurm.loses, slurm.preempts) as strikes:
        ran = run_study_file(
            file,
            db=lab / "deltalab.db",
            executor="slurm",
            workers=2,
            storage=str(shared),
            slurm=["partition=cpu", "time=10"],
        )
    assert len(strikes.hit) == 3, caplog.text
    assert (ran.state, ran.trials, ran.failed, ran.missing) == ("done", alone.trials, 0, {})
    assert ledger(lab / "deltalab.db") == ledger(lab / "alone.db")
    assert_ledger_is_of(lab / "deltalab.db", planned(file))
    jobs = slurm.jobs()
    announced, lost, _ = (jobs[number] for number in strikes.hit)
    assert announced["starts"] >= 2, "it went back into the queue"
    assert lost["state"] == "NODE_FAIL"
    assert (announced["flags"]["signal"], announced["flags"]["partition"]) == ("USR1@90", "cpu")
    assert len(jobs) >= 3, "one in place of the lost one"
    assert not [number for number, about in jobs.items() if about["state"] in ("PENDING", "RUNNING")]
    assert not (shared / "slurm").exists()
