"""A second driver of a study, and trials that take no time."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.support.studies import measured

from deltalab.store import TrialRecord
from deltalab.study.running.run import StudyResult, run_study_file
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.worker import Worker

TEN = {"tune": {"trials": 5, "train.lr": {"log_uniform": [1e-3, 1e-1]}}, "resources": {"stack": 1}}


class Executed:
    """Executes trials without training.

    Attributes:
        by: The thread and the key of each trial.
        wait: What each stack does first.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object] = lambda: None) -> None:
        self.by: list[tuple[str, str]] = []
        self.wait = wait
        monkeypatch.setattr(Worker, "execute", lambda worker, stack, watch: self(stack, watch))

    def __call__(self, stack: Sequence[Job], watch: Callable[[int], None]) -> list[TrialRecord]:
        self.wait()
        watch(3)
        self.by += [(threading.current_thread().name, job.key) for job in stack]
        return [measured(job) for job in stack]

    def count(self, name: str) -> int:
        return sum(by == name for by, _ in self.by)


class Second:
    """A second driver, in a separate thread."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.result: StudyResult | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=args, kwargs=settings, name="second", daemon=True)
        self._thread.start()

    def _run(self, *args: Any, **settings: Any) -> None:
        try:
            self.result = run_study_file(*args, executor="inline", **settings)
        except Exception as error:
            self.result = error

    def ends(self) -> StudyResult:
        self._thread.join(60)
        assert isinstance(self.result, StudyResult), self.result
        return self.result


def until(reached: Callable[[], object], patience: float = 30) -> None:
    """Waits until a condition holds, for `patience` seconds at the most."""
    end = time.monotonic() + patience
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.005)
