"""Writes the claims of drivers to studies, and tells whether the driver behind a claim still lives.

A driver's row in the table `driver` is its claim. A thread of the driver raises a counter in the row every
`BEAT_SECONDS`. The time of day decides
nothing, since clocks jump and differ between machines. A claim is void in two cases:

- The driver ran on this machine and its process is gone. The number and the start of the process show this at once.
- The driver's process cannot be seen from here, and its counter stood still for `LEASE_SECONDS` while this process
  watched, by its own monotonic clock.

A driver that was cut off and lost its claim learns this from the ledger: its heartbeat and its records are refused.
Only the functions whose results are shown to readers (`mark_interrupted`, `living`) use the age of the last heartbeat.
That age is measured by the clock of the database alone.
"""

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

from sqlalchemy import delete, func, select, update
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from deltalab.errors import InputError
from deltalab.store.models import Driver, Stack, Study
from deltalab.store.process import Process

BEAT_SECONDS = 5.0
LEASE_SECONDS = 60.0
HERE: set[str] = set()
"""The ids of the drivers that run in this process."""


class Busy(InputError):
    """Another driver runs the study.

    Attributes:
        driver: The other driver.
    """

    kind = "busy"

    def __init__(self, study: str, driver: Driver) -> None:
        problem = f"study '{study}' is running already, {driver.where}"
        super().__init__(problem, key=study, mend="--join takes part in it")
        self.driver = driver


class TakenOver(InputError):
    """This driver no longer holds its study."""

    kind = "taken_over"

    def __init__(self) -> None:
        super().__init__(
            "another driver has taken the study over, since this one gave no sign of life; it goes on there"
        )


class Heartbeat:
    """Calls `beat` every `BEAT_SECONDS` from a thread, until it returns False because the claim is lost.

    An `InputError` that `beat` raises is ignored: if the database is gone, the driver's next operation raises it, too.
    """

    def __init__(self, beat: Callable[[], bool]) -> None:
        self._beat, self._stop = beat, threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(1.0)  # it takes longer only if the database is gone

    def _run(self) -> None:
        while not self._stop.wait(BEAT_SECONDS):
            try:
                if not self._beat():
                    return
            except InputError:
                continue


def lives(driver: Driver) -> bool | None:
    """Returns whether a driver lives, or None if this process cannot tell."""
    process = Process(driver.host, driver.machine, driver.pid, driver.started)
    return driver.id in HERE if process == Process.here() else process.lives


def holder(session: Session, study_id: int) -> Driver | None:
    """Returns the driver that holds a study, alive or not."""
    return session.scalar(select(Driver).where(Driver.study_id == study_id, Driver.holds))


def claim(session: Session, study: Study, driver_id: str, runs: str, still: tuple[str, int] | None) -> Driver | None:
    """Makes a driver of this process the holder of a study.

    Args:
        session: A transaction that writes.
        runs: The driver's folder of weights.
        still: The id and the counter of a holder whose counter stood still for `LEASE_SECONDS`; None if the caller has
            watched no holder.

    Returns:
        The dead holder whose place the driver took; None if no driver held the study.

    Raises:
        Busy: The holder lives, or may live.
    """
    before = holder(session, study.id)
    if before is not None and before.id != driver_id:
        alive = lives(before)
        if alive or (alive is None and (before.id, before.beat) != still):
            raise Busy(study.name, before)
    session.execute(delete(Driver).where(Driver.study_id == study.id, Driver.holds))
    add(session, study.id, driver_id, runs, holds=True)
    return before if before is not None and before.id != driver_id else None


def add(session: Session, study_id: int, driver_id: str, runs: str, *, holds: bool, places: int = 1) -> None:
    """Adds the row of a driver that runs in this process."""
    here = Process.here()
    session.add(
        Driver(
            id=driver_id,
            study_id=study_id,
            holds=holds,
            host=here.host,
            machine=here.machine,
            pid=here.pid,
            started=here.started,
            runs=runs,
            places=places,
            beat=0,
            beat_at=_seconds(session),
            completed=0,
            total=0,
        )
    )
    session.flush()
    HERE.add(driver_id)


def beat(session: Session, driver_id: str, progress: dict[str, Any]) -> bool:
    """Raises the counter of a driver and records its progress. Returns False if the driver's claim is lost."""
    row = update(Driver).where(Driver.id == driver_id).returning(Driver.id)
    written = row.values(beat=Driver.beat + 1, beat_at=_seconds(session), progress=progress)
    return session.scalar(written) is not None


def require(session: Session, driver_id: str) -> None:
    """Raises `TakenOver` if the claim of a driver is lost."""
    if session.scalar(select(Driver.id).where(Driver.id == driver_id)) is None:
        raise TakenOver


def end(session: Session, study_id: int, driver_id: str) -> None:
    """Ends a holder's claim, and deletes the queue of its study."""
    session.execute(delete(Stack).where(Stack.study_id == study_id))
    session.execute(delete(Driver).where(Driver.id == driver_id))
    HERE.discard(driver_id)


def mark_interrupted(session: Session, studies: Iterable[Study]) -> None:
    """Gives loaded studies that are "running" the state "interrupted" if no living driver holds them.

    The state in the database stays.
    """
    running = {study.id: study for study in studies if study.state == "running"}
    if not running:
        return
    rows = session.scalars(select(Driver).where(Driver.holds, Driver.study_id.in_(running)))
    alive = {row.study_id for row in living(session, rows)}
    for study in running.values():
        if study.id not in alive:
            set_committed_value(study, "state", "interrupted")


def living(session: Session, rows: Iterable[Driver]) -> list[Driver]:
    """Returns the drivers that live.

    If this process cannot tell whether a driver lives, a driver with a recent heartbeat counts as alive. So the result
    is only shown to readers, and decides nothing.
    """
    now = _seconds(session)

    def alive(driver: Driver) -> bool:
        known = lives(driver)
        return 0 <= now - driver.beat_at < LEASE_SECONDS if known is None else known

    return [row for row in rows if alive(row)]


def _seconds(session: Session) -> float:
    """Returns the time of the database's machine, in Unix seconds."""
    if session.get_bind().dialect.name == "sqlite":
        return float(session.execute(select((func.julianday("now") - 2440587.5) * 86400.0)).scalar_one())
    return float(session.execute(select(func.date_part("epoch", func.clock_timestamp()))).scalar_one())
