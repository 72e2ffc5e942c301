"""Writes the ledger. Each method is one transaction: if it fails midway, nothing that it wrote stays."""

import json
import logging
import math
import shlex
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Engine, delete, insert, select, update
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from deltalab.errors import InputError
from deltalab.store import database, drivers
from deltalab.store.held_file import HeldFile, LedgerGone
from deltalab.store.models import Arm, ArmTrial, Artifact, Driver, Metric, RuleVersion, Run, Study, StudyState, Trial
from deltalab.store.outage import PATIENCE_SECONDS, Outage, waited
from deltalab.store.queries import Ledger
from deltalab.store.records import ArmRecord, RuleRecord, TrialRecord, TrialSummary

_log = logging.getLogger("deltalab")


class Store(Ledger):
    """Writes an open ledger, and reads it. Only the process of a driver has a store.

    A writer waits up to 30 s for another writer, in SQLite and in PostgreSQL. Every operation waits for a database that
    is gone, full or locked (`deltalab.store.outage`), and raises `InputError` if the database is not back in time.

    If the file of a ledger that a driver writes is deleted, moved or replaced, the store writes on in a new file, with
    all that the ledger held (`deltalab.store.held_file`), and `require_in_place` raises `LedgerGone`.
    """

    def __init__(self, engine: Engine, patience: float = PATIENCE_SECONDS) -> None:
        super().__init__(engine, patience)
        self._uuid = uuid.uuid4().hex
        self._claims: dict[int, str] = {}
        self._file = _file_of(engine)
        self._gone: LedgerGone | None = None
        self._drove = False
        self._moving = threading.RLock()

    @classmethod
    def open(cls, where: str | Path | None = None, *, create: bool = True, patience: float = PATIENCE_SECONDS) -> Self:
        """Opens a ledger. Unless `create` is false, it makes a missing database, and fills an empty one with tables.

        Opening does not wait for a database that is gone, since its address may be mistyped.

        Args:
            where: PATH, sqlite:///PATH or postgresql://USER@HOST/NAME; None is ./deltalab.db.
            create: Whether to make a database that does not exist.
            patience: The seconds that later operations wait for a database that is gone.

        Raises:
            InputError: The database is not deltalab's, or has an older or newer revision; it is then left as it was. Or
                the database is locked, may not be read or has no server. Or it does not exist and `create` is false.
        """
        engine = database.connect(database.address(where))
        try:
            database.require_current(engine, create=create)
        except InputError:
            engine.dispose()
            raise
        return cls(engine, patience)

    @staticmethod
    def exists(where: str | Path | None = None) -> bool:
        """Returns whether the file at the address exists; True for any database on a server."""
        url = database.address(where)
        return url.get_backend_name() != "sqlite" or Path(str(url.database)).exists()

    @staticmethod
    def upgrade(where: str | Path | None = None) -> None:
        """Migrates an older database to this code's revision.

        Raises:
            InputError: The database does not exist, cannot be used, is not deltalab's, or has a newer revision.
        """
        url = database.address(where)
        database.require_file(url)
        database.migrate(url)

    @property
    def folder(self) -> Path:
        """The folder for files that belong to the ledger: that of an SQLite file, or else the working folder."""
        url = self._engine.url
        local = url.get_backend_name() == "sqlite" and url.database
        return Path(str(url.database)).absolute().parent if local else Path.cwd()

    def close(self) -> None:
        """Closes the database. From now on, another driver may take over a study that this store still claims."""
        drivers.HERE.difference_update(self._claims.values())
        if self._file is not None:
            self._file.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _writing(self) -> Iterator[Session]:
        """Opens a transaction that writes."""
        with self._moving:  # Otherwise another thread might move to a new file amid the transaction.
            self._follow_file()
            engine = self._engine.execution_options(writes=True)
            try:
                with (
                    self._open_file(),
                    database.input_errors(self._engine.url),
                    Session(engine) as session,
                    session.begin(),
                ):
                    yield session
            except InputError as error:
                # SQLite may find that a file was overwritten in place before this store reads it back.
                if self._file is None or not self._claims or "malformed" not in str(error):
                    raise
                self._move()
                self.require_in_place()

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        """Opens a transaction that reads."""
        self._follow_file()
        with self._open_file(), super()._reading() as session:
            yield session

    @contextmanager
    def _open_file(self) -> Iterator[None]:
        """Tells what a file that goes amid a transaction causes from a fault of deltalab: its new file has no tables.

        Raises:
            Outage: The store has moved to a new file, where the transaction succeeds.
            LedgerGone: The store is not a driver's, or the new file cannot be written.
        """
        try:
            yield
        except OperationalError:
            if self._file is None or self._file.in_place:
                raise
            self._follow_file()
            raise Outage(f"{self._engine.url.database}: has the ledger now") from None

    def require_in_place(self) -> None:
        """Raises `LedgerGone` if the ledger's file was deleted, moved or replaced since it was opened."""
        self._follow_file()
        if self._gone is not None:
            raise self._gone

    def _follow_file(self) -> None:
        """Moves to a new file if the ledger's own is not in its place."""
        with self._moving:
            if self._file is not None and not self._file.in_place:
                self._move()

    def _read_back(self, study_id: int, key: str) -> None:
        """Moves to a new file if one who opens the ledger's path does not find this driver's lease and a trial."""
        with self._moving:
            driver_id = self._claims.get(study_id)
            if self._file is not None and driver_id is not None and not self._file.reads_back(driver_id, key):
                self._move()

    def _move(self) -> None:
        """Keeps what the ledger held in a new file, if this store is a driver's, and writes on there.

        Raises:
            LedgerGone: The store is not a driver's, or the new file cannot be written.
        """
        assert self._file is not None
        path = self._file.path
        if not self._drove:
            raise LedgerGone(f"{path}: was deleted, moved or replaced while it was open")
        kept = self._file.keep(next(iter(self._claims.values()), None))
        folder = "" if path.parent.is_dir() else f"mkdir -p {shlex.quote(str(path.parent))} && "
        command = f"{folder}deltalab db import {shlex.quote(str(kept))} --db {shlex.quote(str(path))}"
        self._gone = LedgerGone(
            f"{path}: was deleted, moved or replaced while the study ran; `{command}` "
            "brings back all that it held, and the same command then goes on"
        )
        self._engine = database.connect(database.address(kept))
        self._file = None

    def begin_study(
        self,
        name: str,
        profile: str | None,
        identity: str,
        spec: dict[str, Any],
        arms: Sequence[ArmRecord],
        provenance: dict[str, Any],
        *,
        runs: str = "",
    ) -> int:
        """Claims the study with this identity, marks it as running, and returns its id. The first call creates it.

        The claim lasts until `finish_study` or `close`, as long as `beat` is called. This store takes over a study
        whose driver is gone, and writes a line to the log. If this process cannot see at once whether the driver is
        gone, it watches the driver's heartbeat for a minute. A deleted study is brought back.

        Args:
            profile: The name of the study's profile; None for the default profile.
            identity: The hash of all that the study computes.
            spec: The study, after its profile and overrides were applied.
            provenance: The versions and options with which the study runs. If the study has another provenance from an
                earlier call, this is kept under "earlier".
            runs: The folder of weights, which drivers that join learn from the ledger.

        Raises:
            Busy: Another driver runs the study.
            InputError: The ledger has a study with this identity, but with other arms.
        """
        watched = self._watched(identity)
        if self._file is not None:
            self._file.hold()
        study_id, dead_driver = self._begin(name, profile, identity, spec, arms, provenance, runs, watched)
        if dead_driver is not None:
            _log.warning(f"study '{name}': took over from a driver that is gone, {dead_driver.where}")
        return study_id

    def _watched(self, identity: str) -> tuple[str, int] | None:
        """Watches the study's holder for `LEASE_SECONDS`. Returns its id and its counter if the counter stood still.

        Returns None if no driver holds the study, or if this process can see whether the driver lives. Raises `Busy` if
        the counter grows.
        """
        first, until = None, time.monotonic() + drivers.LEASE_SECONDS
        while True:
            study, driver = self.held(identity)
            if study is None or driver is None or drivers.lives(driver) is not None:
                return None
            if first is None:
                first = driver
                _log.warning(f"study '{study.name}': watching for up to {drivers.LEASE_SECONDS:.0f} s whether its "
                             f"driver {driver.where} still runs")  # fmt: skip
            if (driver.id, driver.beat) != (first.id, first.beat):
                raise drivers.Busy(study.name, driver)
            if time.monotonic() > until:
                return driver.id, driver.beat
            time.sleep(min(1.0, drivers.LEASE_SECONDS / 10))

    @waited
    def held(self, identity: str) -> tuple[Study | None, Driver | None]:
        """Returns the study with this identity, and the driver that holds it, alive or not."""
        with self._reading() as session:
            study = session.scalar(select(Study).where(Study.identity == identity))
            return study, drivers.holder(session, study.id) if study else None

    @waited
    def _begin(
        self,
        name: str,
        profile: str | None,
        identity: str,
        spec: dict[str, Any],
        arms: Sequence[ArmRecord],
        provenance: dict[str, Any],
        runs: str,
        watched: tuple[str, int] | None,
    ) -> tuple[int, Driver | None]:
        """Writes a study and this store's claim. Returns the study's id, and the dead driver that held it or None."""
        with self._writing() as session:
            study = session.scalar(select(Study).where(Study.identity == identity))
            if study is None:
                study = Study(
                    name=name,
                    profile=profile,
                    identity=identity,
                    spec=spec,
                    state="running",
                    created_at=datetime.now(UTC),
                    provenance=provenance,
                )
                session.add(study)
                session.flush()
                for position, arm in enumerate(arms):
                    session.add(Arm(study_id=study.id, position=position, **asdict(arm)))
                return study.id, self._claim(session, study, runs, watched)
            rows = session.scalars(select(Arm).where(Arm.study_id == study.id).order_by(Arm.position))
            recorded, given = [row.name for row in rows], [arm.name for arm in arms]
            if recorded != given:  # The identity holds what arms compute; their settings may be an earlier release's.
                raise InputError(
                    f"study '{name}' is recorded with the arms {', '.join(recorded)}; "
                    f"give this one, with {', '.join(given)}, another name"
                )
            provenance_before = {
                key: value for key, value in study.provenance.items() if key not in ("earlier", "given_up")
            }
            earlier = study.provenance.get("earlier", [])
            as_stored = json.loads(json.dumps(provenance))  # the database gives lists for tuples
            if provenance_before != as_stored:
                study.provenance = {**provenance, "earlier": [*earlier, provenance_before]}
            dead_driver = self._claim(session, study, runs, watched)
            study.state, study.finished_at, study.deleted_at, study.best = "running", None, None, None
            return study.id, dead_driver

    def _claim(self, session: Session, study: Study, runs: str, watched: tuple[str, int] | None) -> Driver | None:
        """Claims a study for this store. Returns the dead driver that held the study, or None."""
        # If the connection was lost during the commit, the second try has the same id, and so finds its own claim.
        driver_id = f"{self._uuid}-{study.id}"
        dead_driver = drivers.claim(session, study, driver_id, runs, watched)
        self._claims[study.id], self._drove = driver_id, True
        return dead_driver

    @waited
    def beat(self, study_id: int, progress: dict[str, Any]) -> bool:
        """Records that this driver lives, and its progress. Returns False if this driver lost its claim."""
        driver_id = self._claims.get(study_id)
        if driver_id is None:
            return False
        with self._writing() as session:
            return drivers.beat(session, driver_id, progress)

    @waited
    def record_trial(
        self, study_id: int, arm: str, record: TrialRecord, number: int, values: dict[str, Any]
    ) -> TrialSummary:
        """Records a trial with its runs, metrics, artifacts and rule, and its number in the arm.

        If the trial is already in the ledger, it is only given its number in this arm.

        Returns:
            The outcome of the trial that the ledger now holds.

        Raises:
            TakenOver: This store lost its claim to the study.
        """
        with self._writing() as session:
            self._require(session, study_id)
            known = session.scalar(select(Trial.id).where(Trial.key == record.key))
            trial_id = _add_trial(session, record) if known is None else known
            _place(session, study_id, arm, trial_id, number, values)
        self._read_back(study_id, record.key)
        if known is None:
            return _summary(record)
        return self.known_trials([record.key])[record.key]

    @waited
    def attach(self, study_id: int, arm: str, key: str, number: int, values: dict[str, Any]) -> None:
        """Gives a recorded trial a number in an arm. A second call changes nothing.

        Raises:
            TakenOver: This store lost its claim to the study.
        """
        with self._writing() as session:
            self._require(session, study_id)
            trial_id = session.scalars(select(Trial.id).where(Trial.key == key)).one()
            _place(session, study_id, arm, trial_id, number, values)

    @waited
    def forget_trial(self, key: str) -> None:
        """Deletes a failed trial so that it runs again. Finished studies that have the trial become "interrupted".

        A second call changes nothing.

        Raises:
            ValueError: The trial did not fail.
        """
        with self._writing() as session:
            trial = session.scalar(select(Trial).where(Trial.key == key))
            if trial is None:
                return
            if trial.state != "failed":
                raise ValueError(f"trial {key} is {trial.state}: only a failed one is forgotten")
            holders = select(Arm.study_id).join(ArmTrial).where(ArmTrial.trial_id == trial.id)
            finished = Study.id.in_(holders), Study.state != "running"
            session.execute(update(Study).where(*finished).values(state="interrupted", best=None))
            session.execute(delete(Trial).where(Trial.id == trial.id))

    @waited
    def finish_study(
        self, study_id: int, state: StudyState, total: int | None = None, given_up: Sequence[str] = ()
    ) -> None:
        """Closes a study and ends this store's claim to it. A study that another driver took over is left as it is.

        Args:
            state: The state of the study from now on.
            total: The number of trials of the whole study; None if they were not counted.
            given_up: A line on each stack of trials that an incomplete study lacks, which says why.
        """
        driver_id = self._claims.get(study_id)
        with self._writing() as session:
            if driver_id is not None and session.get(Driver, driver_id) is None:
                return
            study = session.get_one(Study, study_id)
            study.state, study.finished_at, study.total = state, datetime.now(UTC), total or study.total
            provenance = {key: value for key, value in study.provenance.items() if key != "given_up"}
            study.provenance = {**provenance, "given_up": list(given_up)} if given_up else provenance
            if driver_id is not None:
                drivers.end(session, study_id, driver_id)
        self._claims.pop(study_id, None)

    def _require(self, session: Session, study_id: int) -> None:
        """Raises `TakenOver` if this store lost its claim to the study."""
        if study_id in self._claims:
            drivers.require(session, self._claims[study_id])


def _file_of(engine: Engine) -> HeldFile | None:
    """Returns the file of an SQLite ledger. None stands for any other database, or for an address `file:...`."""
    url = engine.url
    return HeldFile(Path(str(url.database))) if engine.name == "sqlite" and "uri" not in url.query else None


def _add_trial(session: Session, record: TrialRecord) -> int:
    """Adds a trial with its runs, metrics and artifacts, and returns its id."""
    trial = Trial(
        key=record.key,
        task=record.task,
        task_version=record.task_version,
        stage=record.stage,
        config=record.config,
        state=record.state,
        error=record.error and _storable(record.error),
        started_at=datetime.fromtimestamp(record.started_at, UTC),
        finished_at=datetime.fromtimestamp(record.finished_at, UTC),
        seconds=record.seconds,
        parameters=record.parameters,
        state_size=record.state_size,
        tokens_per_second=record.tokens_per_second,
        hardware=record.hardware,
        rule_version_id=_rule_version(session, record.rule),
    )
    session.add(trial)
    session.flush()
    runs = [Run(trial_id=trial.id, seed=run.seed, state=run.state, diverged_at=run.diverged_at) for run in record.runs]
    session.add_all(runs)
    session.flush()
    finite = [
        {"run_id": row.id, "split": split, "name": name, "step": step, "value": value}
        for row, run in zip(runs, record.runs, strict=True)
        for split, name, step, value in run.metrics
        if math.isfinite(value)
    ]
    if finite:  # inserting objects instead of rows takes three times as long
        session.execute(insert(Metric.__table__), finite)  # type: ignore[arg-type]
    session.add_all(
        Artifact(run_id=row.id, **asdict(artifact))
        for row, run in zip(runs, record.runs, strict=True)
        for artifact in run.artifacts
    )
    return trial.id


def _summary(record: TrialRecord) -> TrialSummary:
    """Returns the summary that `known_trials` returns of a trial once `record` is in the ledger."""
    runs = sorted(record.runs, key=lambda run: run.seed)
    finals: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        for split, name, _, value in sorted(run.metrics, key=lambda metric: metric[2]) if run.state == "done" else ():
            if math.isfinite(value):
                finals.setdefault((split, name), {})[run.seed] = value
    diverged = [run.seed for run in runs if run.state == "diverged"]
    error = record.error and _storable(record.error)
    return TrialSummary(record.key, record.state, error, diverged, finals, record.parameters, record.seconds)


def _rule_version(session: Session, rule: RuleRecord) -> int:
    """Returns the id of a version of a rule. Adds this version if the ledger lacks it."""
    query = select(RuleVersion).where(RuleVersion.name == rule.name, RuleVersion.hash == rule.hash)
    version = session.scalar(query)
    if version is None:
        version = RuleVersion(**asdict(rule))
        session.add(version)
        session.flush()
    return version.id


def _place(session: Session, study_id: int, arm: str, trial_id: int, number: int, values: dict[str, Any]) -> None:
    """Gives a trial a number in an arm."""
    arm_id = session.scalars(select(Arm.id).where(Arm.study_id == study_id, Arm.name == arm)).one()
    session.merge(ArmTrial(arm_id=arm_id, trial_id=trial_id, number=number, values=values))


def _storable(text: str) -> str:
    """Returns text that SQLite and PostgreSQL can store. PostgreSQL refuses NUL, and both refuse lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\x00", "\\x00")
