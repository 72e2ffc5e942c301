"""Several drivers of one study, on one machine or many: the holder decides what runs, the others take stacks from it.

The holder's thread `Sharing` publishes as many stacks in the database as the joined drivers have places, and gives
their records to the schedule. A joined driver has `Joined` in the place of a schedule, so that it executes stacks as
any driver does. A stack is with one driver at a time; a driver that is gone loses its stacks to the others.
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
from deltalab.store import Heartbeat, Store, TrialRecord, drivers, queue
from deltalab.store.models import Driver, Stage
from deltalab.store.process import Process
from deltalab.study.planning.plan import Plan
from deltalab.study.running.activity import Account, Count, Pace
from deltalab.study.running.progress_bars import Progress
from deltalab.study.running.schedule import Schedule
from deltalab.study.running.weights_at_url import runs_at
from deltalab.study.workers.jobs import Job, Lost, from_json, stack_from_json, stack_to_json, to_json
from deltalab.study.workers.train_stack import failed

_log = logging.getLogger("deltalab")

POLL_SECONDS = 1.0


class Watched:
    """Other drivers, as this process sees them: which are gone, by the rules of `deltalab.store.drivers`."""

    def __init__(self) -> None:
        self._beats: dict[str, tuple[int, float]] = {}

    def gone(self, driver: Driver) -> bool:
        alive, now = drivers.lives(driver), time.monotonic()
        if alive is not None:
            return not alive
        beat, since = self._beats.get(driver.id, (None, now))
        if beat != driver.beat:
            since = now
        self._beats[driver.id] = driver.beat, since
        return now - since > drivers.LEASE_SECONDS


def collect(store: Store, study_id: int) -> None:
    """Records what joined drivers delivered to a holder that is gone, and empties the queue.

    Stacks that still run there start again here: nobody else would wait for them.
    """
    for entry in queue.stacks(store, study_id):
        if entry.records is not None:
            jobs = {job.key: job for job in stack_from_json(queue.jobs(store, entry.id) or "[]")}
            for record in map(from_json, json.loads(entry.records)):
                if record.key in jobs:
                    job = jobs[record.key]
                    store.record_trial(study_id, job.arm, record, job.number, job.values)
        queue.remove(store, entry.id)


class Sharing:
    """Shares a schedule's stacks with the drivers that have joined, from a thread of the holder.

    What goes wrong in the thread is raised by the schedule's next `next`.
    """

    def __init__(self, schedule: Schedule, progress: Progress) -> None:
        self._counts = (0, 0)
        self._schedule, self._progress = schedule, progress
        self._store, self._study_id = schedule.store, schedule.study_id
        self._out: dict[int, list[Job]] = {}
        self._shown: set[int] = set()
        self._members: dict[str, Driver] = {}
        self._watched = Watched()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sharing", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(5 * POLL_SECONDS)  # it may be waiting for a database that is gone

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.look()
                self._stop.wait(POLL_SECONDS)
        except Exception as error:
            self._schedule.fault = error

    def look(self) -> None:
        """Takes in what has ended, gives out what is wanted."""
        entries = {entry.id: entry for entry in queue.stacks(self._store, self._study_id)}
        for stack_id, stack in list(self._out.items()):
            if stack_id in entries:
                self._follow(entries.pop(stack_id), stack)
            else:  # withdrawn
                self._schedule.returned(self._ended(stack_id))
        for stray in entries:
            queue.remove(self._store, stray)
        places = self._progress.account.elsewhere = sum(driver.places for driver in self._present())
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
        with self._schedule.lock:
            counts = self._schedule.completed, self._schedule.total
        if counts != self._counts:
            queue.count(self._store, self._study_id, *counts)
            self._counts = counts

    def _follow(self, entry: queue.Queued, stack: list[Job]) -> None:
        if entry.driver_id is None and entry.records is None and entry.lost is None:
            self._hide(entry.id)
            return
        if entry.id not in self._shown:
            self._shown.add(entry.id)
            self._progress.started(stack, here=False)
        self._progress.advanced(stack, entry.step)
        if entry.records is not None:
            for record in map(from_json, json.loads(entry.records)):
                self._schedule.finished(record)
        elif entry.lost is not None:
            self._schedule.unfinished(stack, Lost(*json.loads(entry.lost)))
        else:
            return
        queue.remove(self._store, entry.id)
        self._ended(entry.id)

    def _ended(self, stack_id: int) -> list[Job]:
        self._hide(stack_id)
        return self._out.pop(stack_id)

    def _hide(self, stack_id: int) -> None:
        if stack_id in self._shown:
            self._shown.remove(stack_id)
            self._progress.finished(self._out[stack_id])

    def _present(self) -> list[Driver]:
        """The joined drivers that live. Says who came and who went."""
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


class Joined:
    """The stacks that a joined driver takes from the holder's queue, as an executor asks a schedule for them.

    over: the holder has ended the study. gone: the holder has died. completed, total: the trials of the study, as its
    holder counts them. eta: when the study will end, as the holder says. delivered: trials that ran here.
    """

    def __init__(self, plan: Plan, store: Store, study_id: int, runs: Path | str) -> None:
        self.plan = plan
        self.over = self.gone = False
        self.completed = self.total = self.delivered = 0
        self.eta: float | None = None
        self.account = Account()
        self.missing: dict[str, str] = {}
        self.steps: dict[int, int] = {}
        self._store, self._study_id = store, study_id
        self._member = queue.Member(study_id, uuid.uuid4().hex, str(runs))
        self._places = 1
        self._stacks: dict[int, set[str]] = {}
        self._records: dict[int, list[TrialRecord]] = {}
        self._parts: list[list[Job]] = []
        self._watched = Watched()
        self._looked = -POLL_SECONDS

    def __enter__(self) -> Self:
        self._heartbeat = Heartbeat(self._beat)
        self._beat()
        self._heartbeat.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.__exit__(kind, error, trace)
        queue.drop(self._store, self._member.driver_id)

    @property
    def done(self) -> bool:
        return self.ended

    @property
    def ended(self) -> bool:
        return (self.gone or self.over) and not self._stacks

    def look(self) -> None:
        """Sees what has become of the holder."""
        holder = queue.holder(self._store, self._study_id)
        if holder is None:
            self.over = True
        elif self._watched.gone(holder):
            self.gone = True
        else:
            self.completed, self.total = holder.completed, holder.total
            self.eta = holder.progress.get("eta")

    def next(self, places: int) -> list[Job]:
        """A stack from the queue; empty where there is none now. places: how many run here at a time."""
        self._places = places
        if self._parts:
            return self._parts.pop(0)
        if time.monotonic() - self._looked < POLL_SECONDS:
            return []
        taken = queue.take(self._store, self._member, list(self._stacks))
        if taken is None:
            self._looked = time.monotonic()
            self.look()
            return []
        stack_id, jobs = taken
        stack = stack_from_json(jobs)
        self._stacks[stack_id] = {job.key for job in stack}
        self._records[stack_id] = []
        return stack

    def finished(self, record: TrialRecord) -> None:
        """Keeps a record; the last one of a stack sends all of them to the holder."""
        stack_id = self._of(record.key)
        self._records[stack_id].append(record)
        if len(self._records[stack_id]) == len(self._stacks[stack_id]):
            records = json.dumps([to_json(each) for each in self._records[stack_id]])
            if queue.deliver(self._store, self._member, stack_id, records=records):
                self.delivered += len(self._records[stack_id])
            else:
                _log.warning("a stack that ended here was taken away before; its records are dropped")
            self._forget(stack_id)
            self.look()

    def unfinished(self, stack: Sequence[Job], lost: Lost) -> None:
        """As `Schedule.unfinished`; a stack that no trial of it is to blame for goes back to the holder."""
        if lost.of == "infrastructure":
            stack_id = self._of(stack[0].key)
            queue.deliver(self._store, self._member, stack_id, lost=json.dumps([str(lost), lost.of]))
            self._forget(stack_id)
        elif len(stack) > 1:
            self._parts += [[job] for job in stack]
        else:
            self.finished(failed(stack[0], str(lost)))

    def leader(self, task: str) -> None:
        """The holder knows."""

    def stages(self) -> dict[Stage, Count]:
        """The holder counts."""
        return {}

    def pace(self) -> Pace:
        """The holder tells when the study ends."""
        return Pace()

    def _of(self, key: str) -> int:
        return next(stack_id for stack_id, keys in self._stacks.items() if key in keys)

    def _forget(self, stack_id: int) -> None:
        keys = self._stacks.pop(stack_id)
        del self._records[stack_id]
        self.steps.pop(stack_id, None)
        self._parts = [part for part in self._parts if part[0].key not in keys]

    def advanced(self, stack: Sequence[Job], step: int) -> None:
        """Notes a stack's step for the holder."""
        self.steps[self._of(stack[0].key)] = step

    def _beat(self) -> bool:
        doing = self.account.doing().to_json()
        queue.beat(self._store, self._member, self._places, dict(self.steps), doing)
        return True


class JoinedProgress(Progress):
    """Shows a joined driver's stacks, and tells the holder how far they are."""

    def __init__(self, joined: Joined, *, quiet: bool) -> None:
        super().__init__(joined, joined.account, quiet=quiet)
        self._joined = joined

    def eta(self) -> float | None:
        return self._joined.eta

    def advanced(self, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        super().advanced(stack, step, device)
        self._joined.advanced(stack, step)


def held(store: Store, plan: Plan) -> Driver:
    """The living driver of a plan's study.

    One that this process cannot see is watched until its counter moves.
    Raises `InputError` where nobody runs the study, or where it runs with other settings.
    """
    watched, first = Watched(), None
    while True:
        study, driver = store.held(plan.identity)
        if driver is None or watched.gone(driver):
            break
        first = first or driver
        if drivers.lives(driver) or driver.beat != first.beat:
            return driver
        time.sleep(POLL_SECONDS)
    name = plan.spec.name
    others = [other for other in store.studies() if study is None or other.id != study.id]
    if any((other.name, other.profile, other.state) == (name, plan.profile, "running") for other in others):
        raise InputError(f"--join: study '{name}' runs, but with other settings, rules or data than {plan.where} here")
    raise InputError(f"--join: nobody runs study '{name}'; without --join this command does")


def weights(given: Path | str | None, driver: Driver) -> Path | str:
    """Where a joined driver writes weights: the folder or URL of the holder.

    Raises `InputError` where another one is given, and for a folder of another machine that was not given here, too.
    """
    runs = runs_at(driver.runs)
    if given is None and isinstance(runs, Path) and Process.here().host != driver.host:
        raise InputError(f"--join: the study runs on {driver.host}: give a folder that both machines see by --storage")
    if given is not None and given != runs:
        raise InputError(f"--storage: the study's weights go to {runs}, not to {given}")
    return runs
