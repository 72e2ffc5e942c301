"""Studies as a reader keeps them: the list of all, tags, notes, and hidden and deleted studies.

A deleted study is only marked: nothing shows it, `restore` brings it back, and `vacuum` removes it for good. None of
these operations changes what a study computed, and none is part of a study's identity.
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
from deltalab.store.database import display_url
from deltalab.store.ledger import Store
from deltalab.store.models import Arm, ArmTrial, Driver, Run, Study, StudyState, Trial
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

LONGEST_TAG = 50
LONGEST_NOTES = 10_000


@dataclass(frozen=True)
class ListedStudy:
    """A study as a list shows it, without its settings.

    Attributes:
        profile: Its profile; None for the default profile.
        overridden: The settings given beside its file, as words KEY=VALUE.
        created_at: When it was created.
        finished_at: When it ended; None while it runs.
        description: The description in its file.
        hidden: Whether lists leave it out.
        best: The best arm of a task, kept when the study ended; None while there is none.
        total: The trials of the whole study, as its driver counts them; None if an earlier release ran it.
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
        """Returns whether every word of a text is in the name, profile, tags, notes, description or names of arms."""
        searched_text = " ".join(
            (self.address, self.overridden, *self.tags, self.notes, self.description, *arms)
        ).casefold()
        return all(word in searched_text for word in text.casefold().split())


@dataclass(frozen=True)
class Contents:
    """What a study holds.

    Attributes:
        arms: The number of its arms.
        trials: The number of its trials that ran.
        shared: How many of these trials other studies have, too.
        runs: The number of its runs.
    """

    arms: int
    trials: int
    shared: int
    runs: int

    def __str__(self) -> str:
        remark = f" ({self.shared:,} of them stay, since other studies have them, too)" if self.shared else ""
        return f"{self.arms} arms, {self.trials:,} trials{remark} and {self.runs:,} runs"


@waited
def listed(store: Ledger, *, deleted: bool = False) -> list[ListedStudy]:
    """Returns all studies, the latest first, hidden ones included.

    Args:
        deleted: Whether to return the deleted studies instead.
    """
    columns = (
        Study.name, Study.profile, Study.state, Study.created_at, Study.finished_at, Study.tags, Study.notes,
        Study.hidden, Study.best, Study.total,
    )  # fmt: skip
    condition = Study.deleted_at.is_not(None) if deleted else Study.deleted_at.is_(None)
    json_columns = Study.spec["description"].as_string(), Study.provenance["overrides"]
    rows = select(Study, *json_columns).where(condition).options(load_only(*columns))
    with store._reading() as session:
        study_rows = session.execute(rows.order_by(Study.created_at.desc(), Study.id.desc())).all()
        drivers.mark_interrupted(session, [study for study, _, _ in study_rows])
        totals = dict(session.execute(select(Driver.study_id, Driver.total).where(Driver.holds)).tuples().all())
        return [
            ListedStudy(
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
            for study, description, overrides in study_rows
        ]


@waited
def arm_names(store: Ledger) -> dict[int, list[str]]:
    """Returns the names of the arms of every study, by the study's id."""
    names: dict[int, list[str]] = {}
    with store._reading() as session:
        for study, name in session.execute(select(Arm.study_id, Arm.name).order_by(Arm.study_id, Arm.position)):
            names.setdefault(study, []).append(name)
    return names


@waited
def trial_counts(store: Ledger) -> dict[int, int]:
    """Returns how many trials of every study have ended, by the study's id, as its driver counts them.

    A candidate that makes no model does not count. A trial that two arms have counts in each.
    """
    rows = select(Arm.study_id, func.count()).join_from(Arm, ArmTrial).join(Trial)
    rows = rows.where(Trial.state != "infeasible").group_by(Arm.study_id)
    with store._reading() as session:
        return dict(session.execute(rows).tuples().all())


@waited
def contents(store: Ledger, study_id: int) -> Contents:
    """Counts what a study holds.

    Raises:
        InputError: There is no such study.
    """
    of_study = Arm.study_id == study_id, Trial.state != "infeasible"
    trials = select(ArmTrial.trial_id).join(Arm).join(Trial).where(*of_study).distinct()
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
    """Replaces a study's tags.

    Raises:
        InputError: A tag is empty or too long, or it has a comma or a line break.
    """
    clean = list(dict.fromkeys(word.strip() for word in tags))
    for word in clean:
        if not word or len(word) > LONGEST_TAG or "," in word or not word.isprintable():
            raise InputError(f"tag '{word:.100}': a tag has 1 to {LONGEST_TAG} letters, no comma and no line break")
    with store._writing() as session:
        _existing(session, store, study_id).tags = clean


@waited
def note(store: Store, study_id: int, text: str) -> None:
    """Replaces a study's notes.

    Raises:
        InputError: The text is too long.
    """
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
    """Marks a study as deleted. `restore` takes the mark back.

    Raises:
        InputError: The study is running.
    """
    with store._writing() as session:
        study = _existing(session, store, study_id)
        drivers.mark_interrupted(session, [study])
        if study.state == "running":
            raise InputError(f"study '{study.address}' is running: stop it, then delete it")
        study.deleted_at = datetime.now(UTC)


@waited
def restore(store: Store, address: str | int) -> Study:
    """Brings a deleted study back: of several matches, the study that was deleted last.

    Args:
        address: The study's id, NAME or NAME:PROFILE.

    Raises:
        InputError: There is no such deleted study. The message lists the deleted studies.
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
    raise unknown("deleted study", address, names, where=display_url(store._engine.url))


@waited
def keep_best(store: Store, study_id: int, best: dict[str, Any] | None) -> None:
    """Keeps the best arm of a study that has ended, for lists."""
    with store._writing() as session:
        study = session.get(Study, study_id)
        if study is not None and study.state in ("done", "failed"):
            study.best = best


def _existing(session: Session, store: Ledger, study_id: int) -> Study:
    """Returns a study that is not deleted."""
    study = session.get(Study, study_id)
    if study is None or study.deleted_at is not None:
        ids = session.scalars(select(Study.id).where(Study.deleted_at.is_(None)).order_by(Study.id))
        raise unknown("study", study_id, ids, where=display_url(store._engine.url))
    return study
