"""Keeps views of the dashboard by name: a page with the parameters of its address."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from deltalab.errors import InputError, unknown
from deltalab.store.database import display_url
from deltalab.store.ledger import Store
from deltalab.store.models import SavedView, Study
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

LONGEST_NAME = 80


@waited
def save(
    store: Store, name: str, page: str, parameters: Mapping[str, Sequence[str]], study_id: int | None
) -> SavedView:
    """Keeps a view under a name.

    Args:
        store: The ledger.
        name: The name of the view.
        page: The name of the page.
        parameters: The parameters of the page's address, without the study: name -> values.
        study_id: The id of the study that the page shows. None if it shows none.

    Raises:
        InputError: The name is empty, too long or taken, or there is no such study.
    """
    with store._writing() as session:
        if study_id is not None and session.get(Study, study_id) is None:
            raise InputError(f"view '{name:.100}': there is no study {study_id}")
        view = SavedView(
            name=_free(session, name),
            page=page,
            study_id=study_id,
            parameters={key: list(values) for key, values in parameters.items()},
            saved_at=datetime.now(UTC),
        )
        session.add(view)
        session.flush()
        session.expunge(view)
        return view


@waited
def saved(store: Ledger) -> list[SavedView]:
    """Returns all views by their names, without those of deleted studies."""
    rows = select(SavedView).outerjoin(Study, SavedView.study_id == Study.id)
    rows = rows.where(or_(SavedView.study_id.is_(None), Study.deleted_at.is_(None)))
    with store._reading() as session:
        return sorted(session.scalars(rows), key=lambda view: view.name.casefold())


@waited
def named(store: Ledger, name: str) -> SavedView:
    """Returns the view with a name.

    Raises:
        InputError: There is no such view.
    """
    with store._reading() as session:
        view = _existing(session, store, name)
        session.expunge(view)
        return view


@waited
def rename(store: Store, name: str, new: str) -> None:
    """Gives a view another name.

    Raises:
        InputError: There is no such view, or the new name is empty, too long or taken.
    """
    with store._writing() as session:
        view = _existing(session, store, name)
        if new.strip() != name:
            view.name = _free(session, new)


@waited
def delete(store: Store, name: str) -> None:
    """Removes a view.

    Raises:
        InputError: There is no such view.
    """
    with store._writing() as session:
        session.delete(_existing(session, store, name))


def _free(session: Session, name: str) -> str:
    """Returns a name without spaces around it. Raises `InputError` if it is no name, or if a view has it."""
    clean = name.strip()
    if not clean or len(clean) > LONGEST_NAME or not clean.isprintable():
        raise InputError(f"view '{name:.100}': a name has 1 to {LONGEST_NAME} letters and no line break")
    if session.scalar(select(SavedView.id).where(SavedView.name == clean)) is not None:
        raise InputError(f"view '{clean}': exists; choose another name")
    return clean


def _existing(session: Session, store: Ledger, name: str) -> SavedView:
    """Returns the view with a name. Raises `InputError` if there is none."""
    view = session.scalar(select(SavedView).where(SavedView.name == name))
    if view is None:
        raise unknown("view", name, session.scalars(select(SavedView.name)), where=display_url(store._engine.url))
    return view
