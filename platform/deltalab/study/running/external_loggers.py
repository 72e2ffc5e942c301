"""Logs a running study to external loggers, such as wandb. It reads the study from the ledger.

Each logger runs in a separate process, and a thread of the driver feeds it. Only the end of the study waits for a
logger, for a bounded time. What a logger then lacks is logged when the same study is run again.
"""

import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from deltalab import progress
from deltalab.errors import InputError, NotInstalled, one_line
from deltalab.loggers import BUILTIN, LoggedRun, LoggedStudy, require_known
from deltalab.store import Store
from deltalab.store.database import without_password
from deltalab.store.studies import whole_trials
from deltalab.study.planning.tuning_candidates import recorded_trial_name
from deltalab.study.reports.report import Report
from deltalab.study.workers.fork_server import search_path

_log = logging.getLogger("deltalab")

LOAD_SECONDS = 120.0
"""Seconds that a logger has to import what it needs."""
STALL_SECONDS = 60.0
"""Seconds for which the end of a study waits for a logger that makes no progress."""
LONGEST_SECONDS = 600.0
"""Seconds for which the end of a study waits for a logger that makes progress."""
POLL_SECONDS = 2.0
"""Seconds between two looks at the ledger."""
LONGEST_PAUSE = 60.0
"""The most seconds before a target that failed is tried again: the pauses are 2, 4, 8 and so on up to this."""
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from deltalab.loggers.child import main
main(sys.argv[1])
"""


class LoggerGone(Exception):
    """A logger's process has ended."""


class _Target:
    """A logger in its process, with the ids of the runs that it has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.had: set[str] = set()
        self.problem = ""
        self.over = self.killed = False
        self.moved = time.monotonic()
        self._told = False
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, name, json.dumps(search_path())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            process_group=0,  # Ctrl-C on a terminal is for the driver, which ends the logger.
        )

    def ready(self) -> None:
        """Waits until the process has made the logger. Raises `InputError` if the logger cannot be made."""
        late = threading.Timer(LOAD_SECONDS, self.kill)
        late.start()
        try:
            answer = self._answer()
        except LoggerGone as gone:
            answer = {"error": str(gone)}
        finally:
            late.cancel()
        if missing := answer.get("missing"):
            package = f"deltalab[{self.name}]" if self.name in BUILTIN else missing.partition(".")[0]
            raise NotInstalled(f"needs the package {missing}", f"'{package}'", where=f"--log-to {self.name}")
        if error := answer.get("error"):
            raise InputError(f"--log-to {self.name}: cannot be loaded: {_safe(error)}")

    def ask(self, method: str, values: dict[str, Any]) -> dict[str, Any] | None:
        """Calls a method of the logger. Returns the answer, or None if the method raised. Raises `LoggerGone`."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({method: values}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise LoggerGone(self._last_words()) from None
        answer = self._answer()
        if error := answer.get("error"):
            self.tell(error)
            return None
        self.moved = time.monotonic()
        return answer

    def tell(self, problem: str) -> None:
        """Keeps the first problem, and warns of it. Later problems give no warning."""
        self.problem = self.problem or _safe(problem)
        if not self._told:
            self._told = True
            _log.warning(f"--log-to {self.name}: {_safe(problem)}; the study goes on without it")

    def kill(self) -> None:
        """Ends the process and all processes that it started."""
        self.killed = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        """Waits for the logger's next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise LoggerGone(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """Says how the process ended, and what it printed last."""
        self._process.wait()
        self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, self._printed.tell() - 10_000))
        lines = self._printed.read().decode(errors="replace").split("\n")
        last = next((f"; it said last: {line}" for line in reversed(lines) if line.strip()), "")
        return f"its process ended with exit code {self._process.returncode}{last}"


class LogTo:
    """The loggers of a study. They are made before the study runs, so that a missing package costs nothing."""

    def __init__(self, names: Iterable[str], *, quiet: bool = True) -> None:
        """Starts the processes of the loggers.

        Args:
            names: The names of the loggers.
            quiet: Whether not to print where each logger logs.

        Raises:
            InputError: No logger has a name, or a logger cannot be made.
        """
        chosen = [*dict.fromkeys(names)]
        require_known(chosen)
        self._quiet = quiet
        self._targets: list[_Target] = []
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._end: dict[str, Any] = {}
        try:
            for name in chosen:
                self._targets.append(_Target(name))
            for target in self._targets:
                target.ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Returns the loggers, which the end of the block closes."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the loggers."""
        self.close()

    def close(self) -> None:
        """Ends the loggers at once, even if they are still logging."""
        self._ended.set()
        for target in self._targets:
            target.kill()
        for thread in self._threads:
            thread.join(5)  # The thread may be waiting for a database that is gone.
        self._targets = []

    def follow(self, store: Store, study_id: int) -> None:
        """Begins to log the runs of a study: those that the ledger has, and those that it gets until `finish`."""
        self._store, self._study_id, self._study = store, study_id, _logged_study(store, study_id)
        for target in self._targets:
            thread = threading.Thread(target=self._run, args=(target,), name="log-to", daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self, report: Report) -> None:
        """Logs the remaining runs and the report. Waits, for a bounded time, for each logger that makes progress."""
        self._end = {
            "state": report.state,
            "report": json.loads(report.to_json()),
            "markdown": report.to_markdown(),
        }
        self._ended.set()
        began = time.monotonic()
        for target, thread in zip(self._targets, self._threads, strict=True):
            while thread.is_alive():
                thread.join(0.1)
                now = time.monotonic()
                if now - max(target.moved, began) > STALL_SECONDS or now - began > LONGEST_SECONDS:
                    target.problem = target.problem or f"no answer for {now - max(target.moved, began):.0f} s"
                    target.kill()
                    thread.join(5)
                    break
            if not target.over:
                lacking = sum(map(len, self._lacking(target).values()))
                left = f"{lacking} run{'s' * (lacking != 1)} and the report" if lacking else "the report"
                _log.warning(
                    f"--log-to {target.name}: {left} could not be logged ({target.problem or 'unknown'}); "
                    "the same command logs what is missing"
                )

    def _run(self, target: _Target) -> None:
        """Follows the study for a logger, in a thread."""
        try:
            self._follow(target)
        except LoggerGone as gone:
            if not target.killed:
                target.tell(str(gone))
        except Exception as error:
            target.tell(f"{type(error).__name__}: {error}")

    def _follow(self, target: _Target) -> None:
        """Logs runs as they end, then the report."""
        pause = POLL_SECONDS
        while (begun := target.ask("begin", asdict(self._study))) is None:
            if self._ended.is_set():
                return
            self._ended.wait(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
        if begun["where"] and not self._quiet:
            progress.note(f"--log-to {target.name}: {_safe(begun['where'])}")
        target.had = set(begun["seen"])
        counted, pause = -1, POLL_SECONDS
        while True:
            ended, since = self._ended.is_set(), time.monotonic()
            if ended and not self._end:  # The loggers were closed before the study ended.
                return
            count = whole_trials.trial_count(self._store, self._study_id)
            if count != counted or ended:
                whole = self._sweep(target, to_the_end=ended)
                counted = count if whole else -1
                # A large study takes long to read, so read it seldom. A target that failed is tried again later.
                took = time.monotonic() - since
                pause = max(POLL_SECONDS, took) if whole else min(LONGEST_PAUSE, 2 * pause)
            if ended:
                break
            self._ended.wait(pause)
        target.over = target.ask("end", self._end) is not None and whole

    def _sweep(self, target: _Target, *, to_the_end: bool) -> bool:
        """Logs the runs that the target lacks. Stops at the first that cannot be logged, unless `to_the_end`.

        Returns whether every run was logged.
        """
        whole = True
        for (arm, key), ids in self._lacking(target).items():
            trial = whole_trials.whole_trial(self._store, self._study_id, arm, key)
            for run in logged_runs(trial, self._study) if trial else ():
                if run.id not in ids:
                    continue
                if target.ask("log", asdict(run)) is not None:
                    target.had.add(run.id)
                    continue
                whole = False
                if not to_the_end:
                    return False
        return whole

    def _lacking(self, target: _Target) -> dict[tuple[str, str], set[str]]:
        """Returns the ids of the ended runs that the target lacks, by arm and trial."""
        lacking = {}
        for (arm, key), (state, seeds) in whole_trials.ended_trials(self._store, self._study_id).items():
            seeds_or_none: Sequence[int | None] = seeds or [None]
            if ids := {run_id(self._study.id, arm, key, seed, state) for seed in seeds_or_none} - target.had:
                lacking[arm, key] = ids
        return lacking


def run_id(study: str, arm: str, key: str, seed: int | None, state: str) -> str:
    """Makes the id of a run in a target. A failed trial and its later retry give their runs different ids."""
    return hashlib.sha256(json.dumps([study, arm, key, seed, state == "failed"]).encode()).hexdigest()[:24]


def logged_runs(ended: whole_trials.WholeTrial, study: LoggedStudy) -> Iterator[LoggedRun]:
    """Yields the runs of a trial in the form that loggers take.

    For a trial that failed before it had a run, yields one run without a seed.
    """
    trial = ended.trial
    name = recorded_trial_name(study.spec, ended.arm, trial.stage, ended.number).removeprefix(f"{ended.arm}, ")
    facts = {
        name: float(value)
        for name in ("parameters", "state_size", "seconds", "tokens_per_second")
        if (value := getattr(trial, name)) is not None
    }
    runs: Sequence[tuple[int | None, Any]] = [*ended.runs.items()] or [(None, (trial.state, None, {}))]
    for seed, (state, diverged_at, curves) in runs:
        yield LoggedRun(
            id=run_id(study.id, ended.arm, trial.key, seed, trial.state),
            arm=ended.arm,
            task=trial.task,
            stage=trial.stage,
            number=ended.number,
            called=name,
            trial=trial.key,
            seed=seed,
            values=ended.values,
            config=trial.config,
            state=state,
            error=one_line(trial.error.strip().splitlines()[-1], 500) if trial.error and trial.error.strip() else None,
            facts={**facts, **({} if diverged_at is None else {"diverged_at": float(diverged_at)})},
            curves=curves,
        )


def _logged_study(store: Store, study_id: int) -> LoggedStudy:
    """Returns a study in the form that loggers take."""
    study = store.study(study_id)
    overrides = f" with {study.overridden}" if study.overrides else ""
    return LoggedStudy(
        id=study.identity[:16],
        name=study.name,
        profile=study.profile,
        overrides=study.overrides,
        label=f"{study.address}{overrides}",
        description=study.spec.get("description", ""),
        spec=study.spec,
        arms={
            arm.name: {"is_base": arm.is_base, "change": arm.change, "config": arm.config}
            for arm in store.arms(study_id)
        },
        tasks=study.provenance["tasks"],
        folder=str(store.folder),
    )


def _safe(text: str) -> str:
    """Writes a text in one line, without secrets of the environment and passwords of URLs."""
    for name, value in os.environ.items():
        if len(value) >= 6 and re.search("KEY|TOKEN|SECRET|PASSW", name, re.IGNORECASE):
            text = text.replace(value, "***")
    return one_line(without_password(text), 500)
