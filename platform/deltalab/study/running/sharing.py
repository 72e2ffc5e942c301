"""Lets several drivers run one study: the driver that holds it decides what runs, and joined drivers take stacks.

The holder's thread `Sharing` publishes as many stacks in the database as the joined drivers have places, and gives
the records of these stacks to the schedule. A joined driver has `JoinedStacks` in the place of a schedule, so that it
executes stacks as any driver does. Only one driver at a time has a stack. The stacks of a driver that is gone go to
other drivers.
"""

import json
import logging
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from deltalab.errors import InputError
from deltalab.store import Heartbeat, Store, TrialRecord, drivers
from deltalab.store.models import Driver, Stage, Study
from deltalab.store.process import Process
from deltalab.store.studies import queue
from deltalab.study.planning.plan import Plan
from deltalab.study.running.activity import Count, DriverActivity, Pace
from deltalab.study.running.progress_bars import ProgressBars
from deltalab.study.running.schedule import Schedule
from deltalab.study.running.weights_at_url import runs_at
from deltalab.study.workers.jobs import Job, Lost, record_from_json, record_to_json, stack_from_json, stack_to_json
from deltalab.study.workers.train_stack import failed

_log = logging.getLogger("deltalab")

POLL_SECONDS = 0.25
"""Seconds between two looks at the queue."""
ENDED = ("done", "failed")
"""The states of a study in which no trial is missing."""


class DriverWatch:
    """Finds out which other drivers are gone, by the rules of `deltalab.store.drivers`."""

    def __init__(self) -> None:
        """Begins without a driver."""
        self._beats: dict[str, tuple[int, float]] = {}

    def gone(self, driver: Driver) -> bool:
        """Whether a driver has died, or its heartbeat has not moved for too long."""
        alive, now = drivers.lives(driver), time.monotonic()
        if alive is not None:
            return not alive
        beat, since = self._beats.get(driver.id, (None, now))
        if beat != driver.beat:
            since = now
        self._beats[driver.id] = driver.beat, since
        return now - since > drivers.LEASE_SECONDS


def record_delivered(store: Store, study_id: int) -> None:
    """Records the trials that joined drivers delivered to a dead holder, and empties the queue.

    Stacks that still run on the joined drivers start again here, since nobody would take in their records.
    """
    for entry in queue.stacks(store, study_id):
        if entry.records is not None:
            jobs = {job.key: job for job in stack_from_json(queue.jobs(store, entry.id) or "[]")}
            for record in map(record_from_json, json.loads(entry.records)):
                if record.key in jobs:
                    job = jobs[record.key]
                    store.record_trial(study_id, job.arm, record, job.number, job.values)
        queue.remove(store, entry.id)


class Sharing:
    """Shares a schedule's stacks with the drivers that have joined, from a thread of the holder.

    An error in the thread is raised by the next call of the schedule's `next`.
    """

    def __init__(self, schedule: Schedule, progress: ProgressBars) -> None:
        """Makes the thread, which `with` starts."""
        self._counts = (0, 0)
        self._schedule, self._progress = schedule, progress
        self._store, self._study_id = schedule.store, schedule.study_id
        self._out: dict[int, list[Job]] = {}
        self._shown: set[int] = set()
        self._members: dict[str, Driver] = {}
        self._watched = DriverWatch()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sharing", daemon=True)

    def __enter__(self) -> Self:
        """Starts the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(5.0)  # The thread may be waiting for a database that is gone.

    def _run(self) -> None:
        """Calls `refresh` several times a second, in the thread."""
        try:
            while not self._stop.is_set():
                self.refresh()
                self._stop.wait(POLL_SECONDS)
        except Exception as error:
            self._schedule.fault = error

    def refresh(self) -> None:
        """Gives ended stacks to the schedule, and publishes as many stacks as the joined drivers have places."""
        entries = {entry.id: entry for entry in queue.stacks(self._store, self._study_id)}
        for stack_id, stack in list(self._out.items()):
            if stack_id in entries:
                self._follow(entries.pop(stack_id), stack)
            else:  # The stack was withdrawn.
                self._schedule.returned(self._ended(stack_id))
        for stray in entries:
            queue.remove(self._store, stray)
        places = self._progress.activity.elsewhere = sum(driver.places for driver in self._present())
        if places:
            self._count()
        if not places and any(stack_id not in self._shown for stack_id in self._out):
            queue.withdraw(self._store, self._study_id)
        while len(self._out) < places and not self._stop.is_set():
            stack = self._schedule.next(places + 1)
            if not stack:
                break
            self._out[queue.publish(self._store, self._study_id, stack_to_json(stack))] = stack

    def _count(self) -> None:
        """Tells the joined drivers how many trials there are."""
        with self._schedule.lock:
            counts = self._schedule.completed, self._schedule.total
        if counts != self._counts:
            queue.count(self._store, self._study_id, *counts)
            self._counts = counts

    def _follow(self, entry: queue.Queued, stack: list[Job]) -> None:
        """Passes on the state of a published stack: the step that it has reached, its records, or its loss."""
        if entry.driver_id is None and entry.records is None and entry.lost is None:
            self._hide(entry.id)
            return
        if entry.id not in self._shown:
            self._shown.add(entry.id)
            self._progress.started(stack, here=False)
        self._progress.advanced(stack, entry.step)
        if entry.records is not None:
            for record in map(record_from_json, json.loads(entry.records)):
                self._schedule.finished(record)
        elif entry.lost is not None:
            self._schedule.unfinished(stack, Lost(*json.loads(entry.lost)))
        else:
            return
        queue.remove(self._store, entry.id)
        self._ended(entry.id)

    def _ended(self, stack_id: int) -> list[Job]:
        """Forgets a stack, and returns its jobs."""
        self._hide(stack_id)
        return self._out.pop(stack_id)

    def _hide(self, stack_id: int) -> None:
        """Stops showing a stack."""
        if stack_id in self._shown:
            self._shown.remove(stack_id)
            self._progress.finished(self._out[stack_id])

    def _present(self) -> list[Driver]:
        """Returns the joined drivers that live. Logs which drivers came and which went."""
        present = {}
        for driver in queue.joined(self._store, self._study_id):
            if self._watched.gone(driver):
                _log.warning(f"the joined driver {driver.where} is gone; its stacks run again")
                queue.drop(self._store, driver.id)
            else:
                present[driver.id] = driver
        for driver_id in present.keys() - self._members.keys():
            _log.warning(f"a driver {present[driver_id].where} takes part")
        for driver_id in self._members.keys() - present.keys():
            _log.warning(f"the driver {self._members[driver_id].where} takes part no more")
        self._members = present
        return list(present.values())


class JoinedStacks:
    """The stacks that a joined driver takes from the holder's queue, in place of a schedule.

    Attributes:
        plan: The study.
        over: Whether the holder has ended the study.
        gone: Whether the holder has died.
        completed: How many trials of the study have ended, as the holder counts them.
        total: How many trials the study has, as the holder counts them.
        delivered: How many trials ran here.
        eta: Seconds until the study ends, as the holder says; None if the holder does not say.
        activity: What this driver does.
        missing: Always empty: the holder knows which trials are missing.
        steps: The step that each stack has reached, by the stack's id in the queue.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int, runs: Path | str) -> None:
        """Makes the member of the study that `with` registers.

        Args:
            plan: The study.
            store: The ledger.
            study_id: The study's id in the ledger.
            runs: The folder or the URL of weights and checkpoints.
        """
        self.plan = plan
        self.over = self.gone = False
        self.completed = self.total = self.delivered = 0
        self.eta: float | None = None
        self.activity = DriverActivity()
        self.missing: dict[str, str] = {}
        self.steps: dict[int, int] = {}
        self._store, self._study_id = store, study_id
        self._member = queue.Member(study_id, uuid.uuid4().hex, str(runs))
        self._places = 1
        self._stacks: dict[int, set[str]] = {}
        self._records: dict[int, list[TrialRecord]] = {}
        self._parts: list[list[Job]] = []
        self._watched = DriverWatch()
        self._looked = -POLL_SECONDS

    def __enter__(self) -> Self:
        """Joins the study."""
        self._heartbeat = Heartbeat(self._beat)
        self._beat()
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leaves the study."""
        self._heartbeat.__exit__(kind, error, trace)
        queue.drop(self._store, self._member.driver_id)

    @property
    def done(self) -> bool:
        """Whether this driver has nothing left to do."""
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the holder has ended or died, and no stack is left here."""
        return (self.gone or self.over) and not self._stacks

    def refresh(self) -> None:
        """Finds out whether the holder lives, has ended the study or is gone, and reads its counts."""
        holder = queue.holder(self._store, self._study_id)
        if holder is None:
            self.over = True
        elif self._watched.gone(holder):
            self.gone = True
        else:
            self.completed, self.total = holder.completed, holder.total
            self.eta = holder.progress.get("eta")

    def next(self, places: int) -> list[Job]:
        """Takes a stack from the queue; empty if none waits. `places` is how many stacks run here at a time."""
        self._places = places
        if self._parts:
            return self._parts.pop(0)
        if time.monotonic() - self._looked < POLL_SECONDS:
            return []
        taken = queue.take(self._store, self._member, list(self._stacks))
        if taken is None:
            self._looked = time.monotonic()
            self.refresh()
            return []
        stack_id, jobs = taken
        stack = stack_from_json(jobs)
        self._stacks[stack_id] = {job.key for job in stack}
        self._records[stack_id] = []
        return stack

    def finished(self, record: TrialRecord) -> None:
        """Keeps a record. Once all records of a stack are kept, sends them to the holder."""
        stack_id = self._of(record.key)
        self._records[stack_id].append(record)
        if len(self._records[stack_id]) == len(self._stacks[stack_id]):
            records = json.dumps([record_to_json(ended) for ended in self._records[stack_id]])
            if queue.deliver(self._store, self._member, stack_id, records=records):
                self.delivered += len(self._records[stack_id])
            else:
                _log.warning("a stack that ended here was taken away before; its records are dropped")
            self._forget(stack_id)
            self.refresh()

    def unfinished(self, stack: Sequence[Job], lost: Lost) -> None:
        """Does what `Schedule.unfinished` does, but a stack that the infrastructure lost goes back to the holder."""
        if lost.of == "infrastructure":
            stack_id = self._of(stack[0].key)
            queue.deliver(self._store, self._member, stack_id, lost=json.dumps([str(lost), lost.of, lost.at]))
            self._forget(stack_id)
        elif len(stack) > 1:
            self._parts += [[job] for job in stack]
        else:
            self.finished(failed(stack[0], str(lost)))

    def leader(self, task: str) -> None:
        """Returns None, since only the holder knows the best arm."""

    def stages(self) -> dict[Stage, Count]:
        """Returns no stage, since only the holder counts trials."""
        return {}

    def pace(self) -> Pace:
        """Returns no pace, since the holder says when the study ends."""
        return Pace()

    def _of(self, key: str) -> int:
        """Returns the id of the stack that has the trial with a key."""
        return next(stack_id for stack_id, keys in self._stacks.items() if key in keys)

    def _forget(self, stack_id: int) -> None:
        """Forgets a stack that was delivered."""
        keys = self._stacks.pop(stack_id)
        del self._records[stack_id]
        self.steps.pop(stack_id, None)
        self._parts = [part for part in self._parts if part[0].key not in keys]

    def advanced(self, stack: Sequence[Job], step: int) -> None:
        """Notes a stack's step for the holder."""
        self.steps[self._of(stack[0].key)] = step

    def _beat(self) -> bool:
        """Writes a heartbeat, with the steps of the stacks."""
        status = self.activity.status().to_json()
        queue.beat(self._store, self._member, self._places, dict(self.steps), status)
        return True


class JoinedProgressBars(ProgressBars):
    """Shows a joined driver's stacks, and tells the holder which steps the stacks have reached."""

    def __init__(self, joined: JoinedStacks, *, quiet: bool) -> None:
        """Makes the bars, which `with` shows."""
        super().__init__(joined, joined.activity, quiet=quiet)
        self._joined = joined

    def eta(self) -> float | None:
        """Seconds until the study ends, as the holder says."""
        return self._joined.eta

    def advanced(self, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        """Shows the step that a stack has reached, and notes the step for the holder."""
        super().advanced(stack, step, device)
        self._joined.advanced(stack, step)


def driver_of(store: Store, plan: Plan) -> tuple[Driver, bool] | Study:
    """Returns the driver that holds a plan's study, and whether it lives; the study if it has ended.

    If this process cannot see the driver's process, it waits until the counter of the driver's heartbeat moves, or has
    stood still for too long.

    Raises:
        InputError: Nobody holds the study and it has not ended, or it runs with other settings.
    """
    watched, first = DriverWatch(), None
    while True:
        study, driver = store.held(plan.identity)
        if driver is None:
            break
        if watched.gone(driver):
            return driver, False
        first = first or driver
        if drivers.lives(driver) or driver.beat != first.beat:
            return driver, True
        time.sleep(POLL_SECONDS)
    name = plan.spec.name
    others = [other for other in store.studies() if study is None or other.id != study.id]
    if any((other.name, other.profile, other.state) == (name, plan.profile, "running") for other in others):
        raise InputError(
            f"--join: study '{name}' runs, but with other settings, rules or data than {plan.study_file} here"
        )
    if study is not None and study.state in ENDED:
        return study
    raise InputError(f"--join: nobody runs study '{name}'; without --join this command does")


def weights_folder(storage: Path | str | None, driver: Driver) -> Path | str:
    """Returns the folder or the URL where a joined driver writes weights, which is the holder's.

    Args:
        storage: The folder or the URL given for this driver; None if none is given.
        driver: The holder.

    Raises:
        InputError: `storage` is not the holder's, or the holder has a folder on another machine and `storage` is None.
    """
    runs = runs_at(driver.runs)
    if storage is None and isinstance(runs, Path) and Process.here().host != driver.host:
        raise InputError(f"--join: the study runs on {driver.host}: give a folder that both machines see by --storage")
    if storage is not None and storage != runs:
        raise InputError(f"--storage: the study's weights go to {runs}, not to {storage}")
    return runs
