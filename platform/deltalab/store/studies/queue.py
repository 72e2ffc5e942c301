"""The queue of a study: its holder publishes stacks, and the drivers that joined take, train and deliver them.

Each function is one transaction. It changes nothing when it runs a second time, since it is tried again if the
connection was lost during its commit.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from sqlalchemy import Update, delete, select, update
from sqlalchemy.orm import Session

from deltalab.store import drivers
from deltalab.store.ledger import Store
from deltalab.store.models import Driver, Stack
from deltalab.store.outage import waited


class Queued(NamedTuple):
    """A stack in the queue, without its jobs.

    Attributes:
        driver_id: The driver that took the stack; None if the stack waits.
        step: The step that the training of the stack has reached.
        records: The records of the stack's trials as JSON; None until the trials have ended.
        lost: Why no worker could train the stack to the end, as JSON; None if this did not happen.
    """

    id: int
    driver_id: str | None
    step: int
    records: str | None
    lost: str | None


class Member(NamedTuple):
    """A driver that joined a study.

    Attributes:
        runs: The driver's folder of weights.
    """

    study_id: int
    driver_id: str
    runs: str


@waited
def holder(store: Store, study_id: int) -> Driver | None:
    """Returns the driver that holds the study, alive or not."""
    with store._reading() as session:
        return drivers.holder(session, study_id)


@waited
def count(store: Store, study_id: int, completed: int, total: int) -> None:
    """Records how many trials of the study have ended, and how many there are in all, as the holder counts."""
    with store._writing() as session:
        row = update(Driver).where(Driver.study_id == study_id, Driver.holds)
        session.execute(row.values(completed=completed, total=total))


@waited
def joined(store: Store, study_id: int) -> list[Driver]:
    """Returns the drivers that joined the study's holder, alive or not."""
    with store._reading() as session:
        return list(session.scalars(select(Driver).where(Driver.study_id == study_id, Driver.holds.is_(False))))


@waited
def beat(store: Store, member: Member, places: int, steps: Mapping[int, int], progress: dict[str, Any]) -> None:
    """Records that a driver that joined lives, and its progress.

    If the driver has not joined yet, or was dropped, it joins now.

    Args:
        member: The driver.
        places: The number of stacks that the driver takes at a time.
        steps: id of each stack of the driver -> the step that its training has reached.
        progress: The status of the driver, from `DriverStatus.to_json`.
    """
    with store._writing() as session:
        if not drivers.beat(session, member.driver_id, progress):
            _add(session, member)
        session.execute(update(Driver).where(Driver.id == member.driver_id).values(places=places))
        for stack_id, step in steps.items():
            session.execute(_mine(stack_id, member).values(step=step))


@waited
def drop(store: Store, driver_id: str) -> None:
    """Removes a driver that joined. Its stacks wait for another driver."""
    drivers.HERE.discard(driver_id)
    with store._writing() as session:
        # If foreign keys are off, the rows would keep the id of a driver that is gone.
        session.execute(update(Stack).where(Stack.driver_id == driver_id).values(driver_id=None, step=0))
        session.execute(delete(Driver).where(Driver.id == driver_id))


@waited
def publish(store: Store, study_id: int, jobs: str) -> int:
    """Adds a stack to the queue and returns its id."""
    with store._writing() as session:
        known = session.scalar(select(Stack.id).where(Stack.study_id == study_id, Stack.jobs == jobs))
        if known is not None:
            return known
        stack = Stack(study_id=study_id, jobs=jobs, step=0)
        session.add(stack)
        session.flush()
        return stack.id


@waited
def stacks(store: Store, study_id: int) -> list[Queued]:
    """Returns the stacks in the queue, in the order in which they were published."""
    columns = Stack.id, Stack.driver_id, Stack.step, Stack.records, Stack.lost
    with store._reading() as session:
        return [
            Queued._make(row)
            for row in session.execute(select(*columns).where(Stack.study_id == study_id).order_by(Stack.id))
        ]


@waited
def jobs(store: Store, stack_id: int) -> str | None:
    """Returns a stack's jobs as they were published, or None if it is no longer in the queue."""
    with store._reading() as session:
        return session.scalar(select(Stack.jobs).where(Stack.id == stack_id))


@waited
def take(store: Store, member: Member, has: Collection[int]) -> tuple[int, str] | None:
    """Takes a stack that no driver has taken yet.

    Args:
        member: The driver that takes it.
        has: The ids of the stacks that the driver knows it has. If the queue gives the driver a further stack, a commit
            that seemed lost took that stack, and the function returns it.

    Returns:
        The id and the jobs of the stack; None if none waits.
    """
    with store._writing() as session:
        if session.get(Driver, member.driver_id) is None:
            _add(session, member)
        waiting = select(Stack).where(
            Stack.study_id == member.study_id,
            Stack.driver_id.is_(None) | ((Stack.driver_id == member.driver_id) & Stack.id.not_in(has)),
            Stack.records.is_(None),
            Stack.lost.is_(None),
        )
        stack = session.scalar(waiting.order_by(Stack.id).limit(1))
        if stack is None:
            return None
        stack.driver_id = member.driver_id
        return stack.id, stack.jobs


@waited
def deliver(
    store: Store, member: Member, stack_id: int, *, records: str | None = None, lost: str | None = None
) -> bool:
    """Records how a stack ended.

    Returns:
        False if the driver no longer has the stack, since another driver runs it or it left the queue.
    """
    with store._writing() as session:
        mine = _mine(stack_id, member).values(records=records, lost=lost)
        return session.scalar(mine.returning(Stack.id)) is not None


@waited
def remove(store: Store, stack_id: int) -> None:
    """Removes a stack from the queue."""
    with store._writing() as session:
        session.execute(delete(Stack).where(Stack.id == stack_id))


@waited
def withdraw(store: Store, study_id: int) -> None:
    """Removes every stack that no driver has taken."""
    with store._writing() as session:
        free = Stack.study_id == study_id, Stack.driver_id.is_(None), Stack.records.is_(None), Stack.lost.is_(None)
        session.execute(delete(Stack).where(*free))


def _add(session: Session, member: Member) -> None:
    """Adds the row of a driver that joins a study."""
    drivers.add(session, member.study_id, member.driver_id, member.runs, holds=False)


def _mine(stack_id: int, member: Member) -> Update:
    """Returns an SQL update of a stack. The update changes nothing unless `member` has the stack."""
    return update(Stack).where(Stack.id == stack_id, Stack.driver_id == member.driver_id)
