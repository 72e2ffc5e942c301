"""Runs a study's stacks in jobs of Slurm, which submitit submits.

A job has places, which execute stacks one after another, so that a stack waits in no queue. Stacks and results are
files in a folder that all machines share (`mailbox`): only the driver needs the ledger. A job that Slurm preempts, or
whose time is over, goes back into Slurm's queue; meanwhile its stack goes to another place. A job that ends otherwise
is replaced by a new one as long as there is work for it.
"""

import io
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deltalab.errors import InputError, one_line
from deltalab.store.process import Process
from deltalab.study.running.progress_bars import ProgressBars
from deltalab.study.running.schedule import StackSource
from deltalab.study.running.slurm import mailbox
from deltalab.study.running.slurm.mailbox import Mailbox
from deltalab.study.running.slurm.options import SlurmJobs
from deltalab.study.running.slurm.place import Place
from deltalab.study.workers.jobs import Job, Lost, record_from_json, stack_to_json

if TYPE_CHECKING:
    from submitit import Job as SubmittedJob
    from submitit import SlurmExecutor

_log = logging.getLogger("deltalab")

POLL = 0.5
"""Seconds between two looks at the mailboxes."""

ASKS = 30.0
"""Seconds between two questions to Slurm about all jobs."""

SILENT = 60.0
"""Seconds without a sign of life after which a place has lost its stack."""

FRUITLESS = 3
"""So many jobs in a row that end before they begin end the study."""

QUEUED = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "PREEMPTED", "SUSPENDED")
"""The states of a job that will begin, or begin again, without a word from the driver."""

FOLDER = "slurm"
"""The folder in that of weights which has a folder for each driver with jobs."""


def run_all(schedule: StackSource, runs: Path, progress: ProgressBars, *, jobs: SlurmJobs, places: int) -> None:
    """Runs every stack that the schedule gives, until the schedule has ended.

    Args:
        schedule: The stacks.
        runs: The folder of weights and checkpoints, which all machines share.
        progress: Shows the stacks.
        jobs: What each job asks of Slurm.
        places: Stacks at a time.

    Raises:
        InputError: Slurm takes no job, or the jobs end before they begin. Errors of the ledger pass through.
    """
    with _driver_folder(runs) as folder:
        study = _SlurmStudy(schedule, runs, progress, jobs, places, folder)
        try:
            study.run()
        finally:
            _cancel([job.id for job in study.jobs])


class _Job:
    """A job of Slurm and its places."""

    def __init__(self, submitted: "SubmittedJob[None]", places: list["_RemotePlace"]) -> None:
        self.id, self.places, self._submitted = submitted.job_id, places, submitted

    @property
    def begun(self) -> bool:
        """Whether a place of the job has ever shown a sign of life."""
        return any(place.state for place in self.places)

    @property
    def state(self) -> str:
        """The job's state, as Slurm last said it: one word."""
        return str(self._submitted.watcher.get_state(self.id, mode="cache")).partition(" ")[0]

    @property
    def ended(self) -> bool:
        """Whether the job will not run again, as Slurm last said."""
        return self.state not in QUEUED and bool(self._submitted.watcher.is_done(self.id, mode="cache"))

    def why(self) -> str:
        """Says how the job ended, with the last line that its first place wrote to stderr."""
        said = self._submitted.stderr() or ""
        last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
        return one_line(f"Slurm job {self.id} ended as {self.state}" + (f": {last}" if last else ""), 300)


class _RemotePlace:
    """A place, as the driver sees it.

    Attributes:
        state: What the place last wrote; empty before its first sign of life.
        stack: The stack that the place executes; None if it has none.
    """

    def __init__(self, box: Mailbox) -> None:
        self.state: dict[str, Any] = {}
        self.stack: list[Job] | None = None
        self._box, self._number, self._life = box, 0, ""
        self._heard = time.monotonic()

    @property
    def silent(self) -> bool:
        """Whether the place has given no sign of life for too long."""
        return time.monotonic() - self._heard > SILENT

    @property
    def free(self) -> bool:
        """Whether the place waits for a stack."""
        return bool(self.state) and self.stack is None and self.state["end"] is None and not self.silent

    @property
    def warned(self) -> bool:
        """Whether Slurm had announced the end of the process that was given the stack."""
        return bool(self._life == (self.state["life"] if self.state["end"] else self.state["before"]))

    @property
    def gone(self) -> bool:
        """Whether the process that was given the stack has ended, or has been silent for too long."""
        return self.silent or self.state["life"] != self._life or self.state["end"] == "left"

    def give(self, stack: list[Job]) -> None:
        """Gives the place a stack."""
        self.stack, self._number, self._life = stack, self._number + 1, self.state["life"]
        mailbox.write(self._box.order, {"number": self._number, "life": self._life, "stack": stack_to_json(stack)})

    def look(self) -> dict[str, Any] | None:
        """Reads what the place does. Returns what came of its stack; None if nothing has come of it yet."""
        state = mailbox.read(self._box.state)
        if state is not None and (state["life"], state["beat"]) != (self.state.get("life"), self.state.get("beat")):
            self._heard = time.monotonic()
        self.state = state or self.state
        if self.stack is None:
            return None
        file = self._box.result(self._number)
        result = mailbox.read(file) if self.state["done"] == self._number or self.gone else None
        if result is not None:
            file.unlink(missing_ok=True)
        return result


class _SlurmStudy:
    """Runs a study in jobs.

    Attributes:
        jobs: The jobs that run or wait.
    """

    def __init__(
        self,
        schedule: StackSource,
        runs: Path,
        progress: ProgressBars,
        options: SlurmJobs,
        places: int,
        folder: Path,
    ) -> None:
        self.jobs: list[_Job] = []
        self._schedule, self._progress, self._options = schedule, progress, options
        self._folder, self._places = folder, places
        wanted = schedule.plan.spec.resources
        self._place = Place(folder, runs, wanted.threads, wanted.bytes, wanted.gpu, options.stacks)
        self._executor = _executor(folder, options.parameters(wanted), schedule.plan.spec.name)
        self._again: list[list[Job]] = []
        self._begun: set[str] = set()
        self._fruitless = 0
        self._asked = time.monotonic()

    def run(self) -> None:
        """Gives stacks to places until the schedule has ended."""
        while True:
            for job in self.jobs:
                for place in job.places:
                    self._follow(job, place)
            if time.monotonic() - self._asked > ASKS:
                self._drop_ended()
            free = [place for job in self.jobs for place in job.places if place.free]
            while free and (stack := self._again.pop(0) if self._again else self._schedule.next(self._places)):
                free[0].give(stack)
                self._progress.started(stack)
                del free[0]
            running = sum(place.stack is not None for job in self.jobs for place in job.places)
            self._progress.activity.places = max(1, running + len(free))
            if not running and not self._again:
                if not free:
                    self._schedule.refresh()
                if self._schedule.ended:
                    return
            self._submit()
            time.sleep(POLL)

    def _submit(self) -> None:
        """Submits as many jobs as there is work for, and no more than the user wants."""
        left = self._schedule.total - self._schedule.completed - len(self._schedule.missing)
        wanted = -(-min(self._places, max(left, 1)) // self._options.stacks) - len(self.jobs)
        if wanted <= 0:
            return
        ids = []
        for _ in range(wanted):
            submitted = _submitted(self._executor, self._place)
            boxes = [Mailbox(self._folder, submitted.job_id, rank) for rank in range(self._options.stacks)]
            self.jobs.append(_Job(submitted, [_RemotePlace(box) for box in boxes]))
            ids.append(submitted.job_id)
        _log.warning(f"Slurm has {len(ids)} new job{'s' * (len(ids) != 1)}: {', '.join(ids)}")

    def _follow(self, job: _Job, place: _RemotePlace) -> None:
        """Takes what came of a place's stack, or moves the stack if the place is gone."""
        result = place.look()
        if job.begun and job.id not in self._begun:
            self._begun.add(job.id)
            self._fruitless = 0
            _log.warning(f"Slurm job {job.id} begins on {place.state.get('host', 'a machine')}")
        stack = place.stack
        if stack is None:
            return
        if result is None and not place.gone:
            self._progress.advanced(stack, place.state["step"], place.state["device"])
            return
        place.stack = None
        if result is None and place.warned:
            _log.warning(f"Slurm takes job {job.id} back; its stack goes on elsewhere")
            self._again.append(stack)
        elif result is None:
            self._schedule.unfinished(stack, Lost(f"Slurm job {job.id} gives no sign of life", "infrastructure"))
        elif "lost" in result:
            self._schedule.unfinished(stack, Lost(result["lost"], result["of"]))
        else:
            for record in map(record_from_json, result["records"]):
                self._schedule.finished(record)
        self._progress.finished(stack, None if result is None else result["device"])

    def _drop_ended(self) -> None:
        """Asks Slurm about all jobs, and forgets those that have ended or are silent while Slurm says that they run."""
        self._asked = time.monotonic()
        if not self.jobs:
            return
        self.jobs[0]._submitted.watcher.update()
        for job in list(self.jobs):
            hangs = job.begun and job.state not in QUEUED and all(place.silent for place in job.places)
            if not job.ended and not hangs:
                continue
            for place in job.places:
                self._follow(job, place)
                if place.stack is not None:
                    self._lose(job, place)
            why = job.why() if job.ended else f"Slurm job {job.id} gives no sign of life"
            self.jobs.remove(job)
            _cancel([job.id])
            self._fruitless += not job.begun
            if self._fruitless == FRUITLESS:
                raise InputError(f"{FRUITLESS} jobs in a row ended before they began; {why}", where="--executor slurm")
            _log.warning(why)

    def _lose(self, job: _Job, place: _RemotePlace) -> None:
        """Takes the stack from a place of a job that has ended."""
        stack, place.stack = place.stack, None
        assert stack is not None
        if place.warned:
            self._again.append(stack)
        else:
            self._schedule.unfinished(stack, Lost(job.why(), "infrastructure"))
        self._progress.finished(stack)


def _executor(folder: Path, parameters: dict[str, Any], study: str) -> "SlurmExecutor":
    """Makes submitit's executor. Its jobs get SIGUSR1 before their time is over, unless the user has set another."""
    import submitit

    sent = os.environ.get("SUBMITIT_PREEMPT_SIGNAL", "USR1")
    submitit.JobEnvironment.USR_SIG = (
        sent  # Else the script asks for the signal of the time when submitit was imported.
    )
    # A job goes back into the queue as often as its time is over; the driver cancels the job at its end.
    python = f"{shlex.quote(sys.executable)} -P"  # A file of the working folder is no module.
    executor = submitit.SlurmExecutor(folder, max_num_timeout=10**6, python=python)
    setup = [f"export SUBMITIT_PREEMPT_SIGNAL={sent}"]
    executor.update_parameters(job_name=f"deltalab-{study}", setup=setup, **parameters)
    return executor


def _submitted(executor: "SlurmExecutor", place: Place) -> "SubmittedJob[None]":
    """Submits a job. Raises `InputError` with the words of sbatch if Slurm refuses it."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        with redirect_stderr(io.StringIO()):  # submitit prints the words of sbatch, too.
            return executor.submit(place)
    except (FailedJobError, FailedSubmissionError, OSError, subprocess.SubprocessError) as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()] or str(error).splitlines()
        raise InputError(one_line(lines[0] if lines else type(error).__name__), where="--executor slurm") from None


@contextmanager
def _driver_folder(runs: Path) -> Iterator[Path]:
    """Makes the folder by which this driver talks with its jobs, and removes it at the end of the block.

    A thread shows in it that the driver lives. First of all, what killed drivers of this machine left goes: their jobs
    are cancelled and their folders are removed.
    """
    base = runs / FOLDER
    base.mkdir(parents=True, exist_ok=True)
    for file in base.glob(f"*/{mailbox.OWNER}"):
        owner = mailbox.read(file)
        with suppress(KeyError, TypeError):
            if owner is not None and Process(**owner["process"]).lives is False:
                _cancel([pickled.name.partition("_")[0] for pickled in file.parent.glob("*_submitted.pkl")])
                shutil.rmtree(file.parent, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="driver-", dir=base))
    over = threading.Event()
    process = asdict(Process.here())
    mailbox.write(folder / mailbox.OWNER, {"process": process, "beat": 0})

    def show() -> None:
        beat = 0
        while not over.wait(mailbox.PULSE):
            beat += 1
            with suppress(OSError):  # A disk is full; the jobs wait for a while.
                mailbox.write(folder / mailbox.OWNER, {"process": process, "beat": beat})

    thread = threading.Thread(target=show, name="slurm", daemon=True)
    thread.start()
    try:
        yield folder
    finally:
        over.set()
        thread.join(5 * mailbox.PULSE)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            base.rmdir()  # unless another driver has a folder there


def _cancel(ids: Sequence[str]) -> None:
    """Cancels jobs. A job that has ended already is left alone."""
    if ids:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(["scancel", *ids], capture_output=True, timeout=60)
