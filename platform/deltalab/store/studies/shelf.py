"""Lists studies, and lets a reader tag, annotate, hide, delete and restore them.

A deleted study is only marked: nothing shows it, `restore` brings it back, and `vacuum` removes it for good. None of
these operations changes the results of a study or its identity.
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
        profile: The profile of the study; None for the default profile.
        overridden: The settings given in addition to the study's file, as words KEY=VALUE.
        created_at: When the study was created.
        finished_at: When the study ended; None while it runs.
        description: The description in the study's file.
        hidden: Whether lists leave the study out.
        best: The best arm of a task, stored after the study ended; None if none is stored.
        total: The number of trials of the whole study, as its driver counts them; None if an earlier release ran it.
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
        """Returns whether every word of `text` occurs in the name, profile, overrides, tags, notes or description.

        Args:
            text: The words, of which upper and lower case do not matter.
            arms: Names of arms, in which words may also occur.
        """
        return has_words(text, (self.address, self.overridden, *self.tags, self.notes, self.description, *arms))


def has_words(text: str, searched: Iterable[str]) -> bool:
    """Returns whether every word of `text` occurs in a searched text.

    Args:
        text: The words, of which upper and lower case do not matter.
        searched: The searched texts.
    """
    searched_text = " ".join(searched).casefold()
    return all(word in searched_text for word in text.casefold().split())


@dataclass(frozen=True)
class Contents:
    """The numbers of arms, trials and runs of a study.

    Attributes:
        arms: The number of arms.
        trials: The number of trials that ran.
        shared: The number of trials that other studies have, too.
        runs: The number of runs.
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
    """Returns the names of the arms of every study: id of the study -> names."""
    names: dict[int, list[str]] = {}
    with store._reading() as session:
        for study, name in session.execute(select(Arm.study_id, Arm.name).order_by(Arm.study_id, Arm.position)):
            names.setdefault(study, []).append(name)
    return names


@waited
def trial_counts(store: Ledger) -> dict[int, int]:
    """Returns how many trials of every study have ended: id of the study -> number, as the study's driver counts.

    A candidate that makes no model does not count. A trial that two arms share counts twice.
    """
    rows = select(Arm.study_id, func.count()).join_from(Arm, ArmTrial).join(Trial)
    rows = rows.where(Trial.state != "infeasible").group_by(Arm.study_id)
    with store._reading() as session:
        return dict(session.execute(rows).tuples().all())


@waited
def contents(store: Ledger, study_id: int) -> Contents:
    """Counts the arms, trials and runs of a study.

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
    """Brings a deleted study back. If several studies match, it brings back the study that was deleted last.

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
    """Stores the best arm of a study, so that lists can show it. Does nothing unless the study is done or failed."""
    with store._writing() as session:
        study = session.get(Study, study_id)
        if study is not None and study.state in ("done", "failed"):
            study.best = best


def _existing(session: Session, store: Ledger, study_id: int) -> Study:
    """Returns a study. Raises `InputError` if there is no such study or it is deleted."""
    study = session.get(Study, study_id)
    if study is None or study.deleted_at is not None:
        ids = session.scalars(select(Study.id).where(Study.deleted_at.is_(None)).order_by(Study.id))
        raise unknown("study", study_id, ids, where=display_url(store._engine.url))
    return study
