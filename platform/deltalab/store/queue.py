"""The queue of a study: stacks that its holder publishes, and that drivers which joined take, train and deliver.

Every function is one transaction that changes nothing when it runs again, since a lost commit is tried again.
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
    """A stack in the queue, without its jobs. driver_id: who took it. records, lost: JSON of how it ended."""

    id: int
    driver_id: str | None
    step: int
    records: str | None
    lost: str | None


class Member(NamedTuple):
    """A driver that joined: of which study, under which id, with which folder of weights."""

    study_id: int
    driver_id: str
    runs: str


@waited
def holder(store: Store, study_id: int) -> Driver | None:
    """The driver that holds the study, alive or not."""
    with store._reading() as session:
        return drivers.holder(session, study_id)


@waited
def count(store: Store, study_id: int, completed: int, total: int) -> None:
    """Notes how many trials the holder has."""
    with store._writing() as session:
        row = update(Driver).where(Driver.study_id == study_id, Driver.holds)
        session.execute(row.values(completed=completed, total=total))


@waited
def joined(store: Store, study_id: int) -> list[Driver]:
    """The drivers that joined the study's holder, alive or not."""
    with store._reading() as session:
        return list(session.scalars(select(Driver).where(Driver.study_id == study_id, Driver.holds.is_(False))))


@waited
def beat(store: Store, member: Member, places: int, steps: Mapping[int, int], progress: dict[str, Any]) -> None:
    """Shows that a driver that joined lives, and what it does. Lets it join where it has not, or was dropped.

    places: how many stacks it takes at a time. steps: by the stack's id.
    """
    with store._writing() as session:
        if not drivers.beat(session, member.driver_id, progress):
            _add(session, member)
        session.execute(update(Driver).where(Driver.id == member.driver_id).values(places=places))
        for stack_id, step in steps.items():
            session.execute(_mine(stack_id, member).values(step=step))


@waited
def drop(store: Store, driver_id: str) -> None:
    """Takes out a driver that joined. Its stacks wait for another one."""
    drivers.HERE.discard(driver_id)
    with store._writing() as session:
        # Where foreign keys are off, the rows would keep the name of a driver that is gone.
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
    """What is in the queue, in the order in which it was published."""
    columns = Stack.id, Stack.driver_id, Stack.step, Stack.records, Stack.lost
    with store._reading() as session:
        return [
            Queued._make(row)
            for row in session.execute(select(*columns).where(Stack.study_id == study_id).order_by(Stack.id))
        ]


@waited
def jobs(store: Store, stack_id: int) -> str | None:
    """A stack's jobs, as they were published; None where it is no longer in the queue."""
    with store._reading() as session:
        return session.scalar(select(Stack.jobs).where(Stack.id == stack_id))


@waited
def take(store: Store, member: Member, has: Collection[int]) -> tuple[int, str] | None:
    """The id and jobs of a stack that nobody has taken yet, now taken; None where there is none.

    has: the stacks that this driver knows it has.
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
    """Puts into the queue how a stack ended. False where it was taken away: another driver runs it, or none has to."""
    with store._writing() as session:
        mine = _mine(stack_id, member).values(records=records, lost=lost)
        return session.scalar(mine.returning(Stack.id)) is not None


@waited
def remove(store: Store, stack_id: int) -> None:
    """Takes a stack out of the queue."""
    with store._writing() as session:
        session.execute(delete(Stack).where(Stack.id == stack_id))


@waited
def withdraw(store: Store, study_id: int) -> None:
    """Takes out every stack that no driver has taken."""
    with store._writing() as session:
        free = Stack.study_id == study_id, Stack.driver_id.is_(None), Stack.records.is_(None), Stack.lost.is_(None)
        session.execute(delete(Stack).where(*free))


def _add(session: Session, member: Member) -> None:
    drivers.add(session, member.study_id, member.driver_id, member.runs, holds=False)


def _mine(stack_id: int, member: Member) -> Update:
    return update(Stack).where(Stack.id == stack_id, Stack.driver_id == member.driver_id)
