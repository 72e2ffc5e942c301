"""Studies as a reader keeps them: the list of all, tags, notes, hidden and deleted ones.

A deleted study is only marked: nothing shows it, `restore` brings it back, and `vacuum` removes it for good. None of
this touches what a study computed, and none of it is part of its identity.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session, load_only

from deltalab.errors import InputError, unknown
from deltalab.reading import pairs
from deltalab.store import drivers
from deltalab.store.database import shown
from deltalab.store.ledger import Store
from deltalab.store.models import Arm, ArmTrial, Driver, Run, Study, StudyState, Trial
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

LONGEST_TAG = 50
LONGEST_NOTES = 10_000


@dataclass(frozen=True)
class Listed:
    """A study as a list shows it, without its settings.

    overridden: settings given beside its file, as words KEY=VALUE.
    best: the best arm of a task, kept when the study ended; None while there is none.
    total: the trials of the whole study, as its driver counts them; None where an earlier release ran it.
    """

    id: int
    name: str
    profile: str | None
    overridden: str
    state: StudyState
    created_at: datetime
    finished_at: datetime | None
    description: str
    tags: tuple[str, ...]
    notes: str
    hidden: bool
    best: dict[str, Any] | None
    total: int | None

    @property
    def address(self) -> str:
        """NAME:PROFILE, or NAME for the default profile."""
        return f"{self.name}:{self.profile}" if self.profile else self.name

    def says(self, text: str, arms: Iterable[str] = ()) -> bool:
        """Whether every word of a text is in the name, profile, tags, notes, description or names of arms."""
        said = " ".join((self.address, self.overridden, *self.tags, self.notes, self.description, *arms)).casefold()
        return all(word in said for word in text.casefold().split())


@dataclass(frozen=True)
class Contents:
    """What a study holds. trials: that ran. shared: how many of them other studies have, too."""

    arms: int
    trials: int
    shared: int
    runs: int

    def __str__(self) -> str:
        kept = f" ({self.shared:,} of them stay, since other studies have them, too)" if self.shared else ""
        return f"{self.arms} arms, {self.trials:,} trials{kept} and {self.runs:,} runs"


@waited
def listed(store: Ledger, *, deleted: bool = False) -> list[Listed]:
    """All studies, the latest first, hidden ones too; those that are deleted instead where `deleted`."""
    columns = (
        Study.name, Study.profile, Study.state, Study.created_at, Study.finished_at, Study.tags, Study.notes,
        Study.hidden, Study.best, Study.total,
    )  # fmt: skip
    chosen = Study.deleted_at.is_not(None) if deleted else Study.deleted_at.is_(None)
    inside = Study.spec["description"].as_string(), Study.provenance["overrides"]
    rows = select(Study, *inside).where(chosen).options(load_only(*columns))
    with store._reading() as session:
        found = session.execute(rows.order_by(Study.created_at.desc(), Study.id.desc())).all()
        drivers.shown(session, [study for study, _, _ in found])
        totals = dict(session.execute(select(Driver.study_id, Driver.total).where(Driver.holds)).tuples().all())
        return [
            Listed(
                id=study.id,
                name=study.name,
                profile=study.profile,
                overridden=pairs(overrides or {}),
                state=study.state,
                created_at=study.created_at,
                finished_at=study.finished_at,
                description=description or "",
                tags=tuple(study.tags),
                notes=study.notes,
                hidden=study.hidden,
                best=study.best,
                total=totals.get(study.id) or study.total,
            )
            for study, description, overrides in found
        ]


@waited
def arm_names(store: Ledger) -> dict[int, list[str]]:
    """The names of the arms of every study, by the study's id."""
    names: dict[int, list[str]] = {}
    with store._reading() as session:
        for study, name in session.execute(select(Arm.study_id, Arm.name).order_by(Arm.study_id, Arm.position)):
            names.setdefault(study, []).append(name)
    return names


@waited
def trial_counts(store: Ledger) -> dict[int, int]:
    """How many trials of every study have ended, by the study's id, as its driver counts them.

    A candidate that makes no model is none; a trial that two arms have is one of each.
    """
    rows = select(Arm.study_id, func.count()).join_from(Arm, ArmTrial).join(Trial)
    rows = rows.where(Trial.state != "infeasible").group_by(Arm.study_id)
    with store._reading() as session:
        return dict(session.execute(rows).tuples().all())


@waited
def contents(store: Ledger, study_id: int) -> Contents:
    """What a study holds. Raises `InputError` where there is no such study."""
    ran = Arm.study_id == study_id, Trial.state != "infeasible"
    trials = select(ArmTrial.trial_id).join(Arm).join(Trial).where(*ran).distinct()
    elsewhere = select(ArmTrial.trial_id).join(Arm).where(Arm.study_id != study_id, ArmTrial.trial_id.in_(trials))
    with store._reading() as session:
        _existing(session, store, study_id)

        def count(rows: Select[Any]) -> int:
            return session.scalar(select(func.count()).select_from(rows.subquery())) or 0

        return Contents(
            arms=count(select(Arm.id).where(Arm.study_id == study_id)),
            trials=count(trials),
            shared=count(elsewhere.distinct()),
            runs=count(select(Run.id).where(Run.trial_id.in_(trials))),
        )


@waited
def tag(store: Store, study_id: int, tags: Sequence[str]) -> None:
    """Replaces a study's tags. Raises `InputError` for a tag that is empty, too long or has a comma or a line break."""
    clean = list(dict.fromkeys(one.strip() for one in tags))
    for one in clean:
        if not one or len(one) > LONGEST_TAG or "," in one or not one.isprintable():
            raise InputError(f"tag '{one:.100}': a tag has 1 to {LONGEST_TAG} letters, no comma and no line break")
    with store._writing() as session:
        _existing(session, store, study_id).tags = clean


@waited
def note(store: Store, study_id: int, text: str) -> None:
    """Replaces a study's notes. Raises `InputError` for a text that is too long."""
    if len(text) > LONGEST_NOTES:
        raise InputError(f"notes have at most {LONGEST_NOTES:,} letters, not {len(text):,}")
    with store._writing() as session:
        _existing(session, store, study_id).notes = text.strip()


@waited
def hide(store: Store, study_id: int, hidden: bool = True) -> None:
    """Leaves a study out of lists, or shows it in them again."""
    with store._writing() as session:
        _existing(session, store, study_id).hidden = hidden


@waited
def delete(store: Store, study_id: int) -> None:
    """Marks a study as deleted; `restore` takes the mark back. Raises `InputError` for a study that runs."""
    with store._writing() as session:
        study = _existing(session, store, study_id)
        drivers.shown(session, [study])
        if study.state == "running":
            raise InputError(f"study '{study.address}' is running: stop it, then delete it")
        study.deleted_at = datetime.now(UTC)


@waited
def restore(store: Store, address: str | int) -> Study:
    """Brings a deleted study back: the one with this id, NAME or NAME:PROFILE, of several the one deleted last.

    Raises `InputError` where there is no such deleted study, and lists those that there are.
    """
    with store._writing() as session:
        rows = select(Study).where(Study.deleted_at.is_not(None)).order_by(Study.deleted_at.desc(), Study.id.desc())
        deleted = list(session.scalars(rows))
        for study in deleted:
            if str(address) in (study.address, str(study.id)):
                study.deleted_at = None
                session.flush()
                session.expunge(study)
                return study
        names = sorted({study.address for study in deleted})
    raise unknown("deleted study", address, names, where=shown(store._engine.url))


@waited
def keep_best(store: Store, study_id: int, best: dict[str, Any] | None) -> None:
    """Keeps the best arm of a study that has ended, for lists."""
    with store._writing() as session:
        study = session.get(Study, study_id)
        if study is not None and study.state in ("done", "failed"):
            study.best = best


def _existing(session: Session, store: Ledger, study_id: int) -> Study:
    study = session.get(Study, study_id)
    if study is None or study.deleted_at is not None:
        known = session.scalars(select(Study.id).where(Study.deleted_at.is_(None)).order_by(Study.id))
        raise unknown("study", study_id, known, where=shown(store._engine.url))
    return study
