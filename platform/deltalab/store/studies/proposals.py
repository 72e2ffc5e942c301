"""Counts the rules that a loop proposes, and keeps the answers.

Each function is one transaction. A second call with the same arguments changes nothing, so that a loop that was killed
goes on with the numbers and the confirmation that it had. Writers wait for one another, so that two processes of a loop
never have one number or one confirmation.
"""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from deltalab.store.ledger import Store
from deltalab.store.models import Proposal
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger


@waited
def propose(store: Store, loop: str, rule: str, source: str) -> Proposal:
    """Returns the proposal of a rule's file. The first call gives it the next number of the loop."""
    with store._writing() as session:
        known = session.scalar(select(Proposal).where(Proposal.loop == loop, Proposal.source == source))
        if known is None:
            number = _most(session, loop, "number") + 1
            known = Proposal(loop=loop, number=number, rule=rule, source=source, asked_at=datetime.now(UTC))
            session.add(known)
        session.flush()
        session.expunge(known)
        return known


@waited
def confirm(store: Store, proposal: Proposal) -> int:
    """Returns the confirmation of a proposal. The first call gives it the next one of the loop."""
    with store._writing() as session:
        known = session.get_one(Proposal, proposal.id)
        if known.confirmation is None:
            known.confirmation = _most(session, known.loop, "confirmation") + 1
        return known.confirmation


@waited
def answer(store: Store, proposal: Proposal, given: dict[str, Any]) -> None:
    """Keeps the answer to a proposal. A proposal that was answered before keeps its answer."""
    with store._writing() as session:
        known = session.get_one(Proposal, proposal.id)
        known.answer = known.answer or given


@waited
def proposals(store: Ledger, loop: str) -> list[Proposal]:
    """Returns the proposals of a loop, in the order in which they were made."""
    with store._reading() as session:
        return list(session.scalars(select(Proposal).where(Proposal.loop == loop).order_by(Proposal.number)))


def _most(session: Session, loop: str, column: str) -> int:
    """The largest value of a column in a loop; 0 if there is none."""
    return session.scalar(select(func.max(getattr(Proposal, column))).where(Proposal.loop == loop)) or 0
