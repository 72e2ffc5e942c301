"""A tiny study as a command of its own, what became of it, and all that it started."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from sqlalchemy import create_engine, text
from tests.chaos import answer as answers
from tests.support.delta_rule import delta_rule

from deltalab.store import Store
from deltalab.study.reports.report import report

ROOT = Path(__file__).parents[2]
CHECKPOINTS = """\
from deltalab.training.train import train_together

train_together.__kwdefaults__["checkpoint_seconds"] = 0.0"""
"""Workers save a checkpoint at every evaluation, so that kills strike the writing too."""

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "chaos",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "mlp": False, "chunk_size": 16},
        "train": {"steps": 60, "batch_size": 4, "lr": 0.01, "evaluations": 6, "eval_batches": 1},
    },
    "arms": {"without_conv": {"model": {"conv": 0}}},
    "tune": {"trials": 4, "train.lr": {"log_uniform": [1e-3, 1e-1]}},
    "seeds": 2,
}
"""Eight trials: some 10 s of one core, half of it imports."""

STARTUP = 3.0
"""Seconds until a driver trains, on a quiet machine."""


def end(process: psutil.Process | subprocess.Popen[bytes], with_signal: int = signal.SIGKILL) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, with_signal)


@dataclass
class Lab:
    """A folder with a study's file and its ledger. more: options of `study run`. environment: for the command.

    commands: how often the command had to be given.
    """

    folder: Path
    url: str
    more: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    commands: int = 0
    sessions: list[int] = field(default_factory=list)

    def write(self, **given: Any) -> None:
        (self.folder / "plugins").mkdir()
        (self.folder / "plugins" / "chaos.py").write_text(delta_rule("chaos", at_import=CHECKPOINTS))
        (self.folder / "s.yaml").write_text(yaml.safe_dump({**STUDY, **given}, sort_keys=False))

    def start(
        self, *more: str, before: Sequence[str] = (), limits: Callable[[], None] | None = None
    ) -> subprocess.Popen[bytes]:
        """Gives the command, in a session of its own; what it prints goes into a file of the lab.

        before: a command that runs this one. limits: called in the process before it begins.
        """
        (self.folder / "tmp").mkdir(exist_ok=True)
        path = os.pathsep.join(str(ROOT / name) for name in ("platform", "plugins", "dashboard"))
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "DELTALAB_DB": self.url,
            "TMPDIR": str(self.folder / "tmp"), "RAY_TMPDIR": str(self.folder / "tmp"), **self.environment,
        }  # fmt: skip
        command = [
            *before,
            sys.executable,
            "-m",
            "deltalab",
            "study",
            "run",
            "s.yaml",
            "--json",
            "--unchecked",
            *self.more,
            *more,
        ]
        with (self.folder / f"log{self.commands}").open("wb") as log, (self.folder / "out").open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, start_new_session=True, stdout=out, stderr=log,
                preexec_fn=limits,
            )  # fmt: skip
        self.commands += 1
        self.sessions.append(process.pid)
        return process

    def log(self) -> str:
        return (self.folder / f"log{self.commands - 1}").read_text(errors="replace")

    def alive(self) -> list[psutil.Process]:
        """All that the lab's commands started and that still runs."""
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in self.sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (ProcessLookupError, psutil.Error):
                continue
        return found

    def workers(self, name: str = "") -> list[psutil.Process]:
        """The processes of the lab but its drivers, those whose name has `name`."""
        found = []
        for process in self.alive():
            try:
                if process.pid not in self.sessions and name in process.name():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def running(self) -> list[str]:
        """The names of `workers`."""
        found = []
        for process in self.workers():
            with suppress(psutil.NoSuchProcess):
                found.append(process.name())
        return found

    def begun(self, process: subprocess.Popen[bytes], trials: int = 1) -> None:
        """Waits until the ledger has a few trials."""
        until = time.monotonic() + 120
        while self.recorded() < trials:
            assert process.poll() is None, self.log()
            assert time.monotonic() < until
            time.sleep(0.05)

    def finish(self, process: subprocess.Popen[bytes], patience: float = 240) -> None:
        """Waits for the command, and gives it again for as long as it says that it can go on, three times at most."""
        for again in range(4):
            code = process.wait(timeout=patience)
            for log in self.folder.glob("log*"):
                assert "Traceback (most recent call last)" not in log.read_text(errors="replace"), log.read_text()
            if code == 0:
                return
            assert again < 3, f"exit code {code}: {self.log()}"
            process = self.start()

    def follows(self, patience: float = 30) -> None:
        """All that a killed driver started must follow it. Ray's agents take a minute to see that they are alone."""
        until = time.monotonic() + patience
        agents = ("ray::DashboardA", "ray::RuntimeEnv")
        while left := [name for name in self.running() if not name.endswith(agents)]:
            assert time.monotonic() < until, left
            time.sleep(0.05)

    def answer(self) -> dict[str, list[str]]:
        return answers.answer(self.url)

    def report(self) -> str:
        """The report's figures as JSON, without times and without the ledger's own ids."""
        with Store.open(self.url) as store:
            return json.dumps(_timeless(json.loads(report(store, store.study("s").id).to_json())), sort_keys=True)

    def check_files(self) -> None:
        """Every weight that the ledger names is whole, and nothing else is left behind."""
        engine = create_engine(self.url)
        with engine.connect() as connection:
            for path, digest in connection.execute(text("SELECT path, sha256 FROM artifact")):
                assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == digest, path
        engine.dispose()
        runs = self.folder / "runs"
        left = [*runs.rglob("*.partial"), *runs.glob("checkpoints/*"), *runs.glob(".ray-*")]
        assert not left, left

    def recorded(self) -> int:
        """Trials in the ledger; 0 where it cannot be read now."""
        engine = create_engine(self.url)
        try:
            with engine.connect() as connection:
                return int(connection.execute(text("SELECT count(*) FROM trial")).scalar_one())
        except Exception:
            return 0
        finally:
            engine.dispose()


def _timeless(found: Any) -> Any:
    times = {"seconds", "microseconds_per_token", "study_id", "tokens_per_second"}
    if isinstance(found, dict):
        return {name: _timeless(value) for name, value in found.items() if name not in times}
    if isinstance(found, list):
        return [_timeless(value) for value in found if not str(value).startswith("The machine was loaded:")]
    return found


@contextmanager
def lab(url: str | None = None, *more: str, **study: Any) -> Iterator[Lab]:
    """A lab in a folder with a short name, since Ray makes sockets in it. It stays where its test fails."""
    folder = Path(tempfile.mkdtemp(prefix="c", dir="/tmp"))
    one = Lab(folder, url or f"sqlite:///{folder / 'lab.db'}", list(more))
    one.write(**study)
    try:
        yield one
    finally:
        for process in one.alive():
            end(process, signal.SIGCONT)
            end(process)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Right:
    """What the study comes to in peace. seconds: how long it took."""

    answer: dict[str, list[str]]
    report: str
    seconds: float

    def row(self, one: Lab) -> dict[str, int]:
        """What is wrong with a lab's ledger: results lost, rows doubled, answers or reports that differ."""
        found = one.answer()
        unequal = found != self.answer or one.report() != self.report
        return {
            "lost": answers.lost(self.answer, found),
            "doubled": answers.doubled(found),
            "unequal": int(unequal),
        }

    def demand(self, one: Lab) -> None:
        found = one.answer()
        assert found == self.answer, answers.differences(self.answer, found)
        report = one.report()
        assert report == self.report, _apart(json.loads(self.report), json.loads(report))
        one.check_files()


def _apart(right: Any, found: Any, at: str = "report") -> list[str]:
    """Where two reports differ."""
    if isinstance(right, dict) and isinstance(found, dict):
        keys = sorted({*right, *found})
        return [line for key in keys for line in _apart(right.get(key), found.get(key), f"{at}.{key}")]
    if isinstance(right, list) and isinstance(found, list) and len(right) == len(found):
        return [line for i, pair in enumerate(zip(right, found, strict=True)) for line in _apart(*pair, f"{at}[{i}]")]
    return [] if right == found else [f"{at}: {right!r} became {found!r}"]


def undisturbed(patience: float = 300, **study: Any) -> Right:
    with lab(None, "--executor", "inline", **study) as one:
        began = time.monotonic()
        process = one.start()
        assert process.wait(timeout=patience) == 0, one.log()
        seconds = time.monotonic() - began
        one.check_files()
        return Right(one.answer(), one.report(), seconds)


def moment(rng: random.Random, right: Right) -> float:
    """Seconds after a start: one of five while the driver starts, the others while it trains."""
    if rng.random() < 0.2:
        return rng.uniform(0, STARTUP)
    return STARTUP + rng.uniform(0, right.seconds - STARTUP)
