"""Runs a study to its end: the schedule decides, workers execute, the ledger keeps the results."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from deltalab.authoring import verdict
from deltalab.authoring.module_checks.module_suite import demand_modules
from deltalab.errors import InputError
from deltalab.registry import rule_plugin
from deltalab.store import ArmRecord, Busy, Heartbeat, Store
from deltalab.store.copies.backup import Backups
from deltalab.store.database import without_password
from deltalab.store.models import Study, StudyState
from deltalab.store.studies.shelf import keep_best
from deltalab.study.planning import warm_starts
from deltalab.study.planning.further_looks import as_further_look
from deltalab.study.planning.known_trials import known_trials
from deltalab.study.planning.make import plan_study
from deltalab.study.planning.plan import Plan
from deltalab.study.reports.best_arm import find_best_arm
from deltalab.study.reports.report import Report, report
from deltalab.study.running import signals
from deltalab.study.running.activity import DriverActivity
from deltalab.study.running.external_loggers import LogTo
from deltalab.study.running.progress_bars import ProgressBars
from deltalab.study.running.schedule import Schedule, StackSource
from deltalab.study.running.settings import Executor, RunSettings, require_runnable
from deltalab.study.running.sharing import (
    JoinedProgressBars,
    JoinedStacks,
    Sharing,
    driver_of,
    record_delivered,
    weights_folder,
)
from deltalab.study.running.slurm.options import read_options
from deltalab.study.running.weights_at_url import interrupted_stacks, make_worker, runs_at
from deltalab.study.specs.overrides import Overrides
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.worker import Worker
from deltalab.training.train import NUMERICS, hardware

_log = logging.getLogger("deltalab")

WAIT = 0.1
"""Seconds after which a driver asks again for a stack, while a lost stack waits to be tried again."""


@dataclass(frozen=True)
class StudyResult:
    """How a study ended.

    Attributes:
        study_id: The study's id in the ledger.
        name: The study's name.
        state: The study's state.
        trials: How many trials of the study have ended, infeasible candidates not counted.
        known: How many trials the ledger already had.
        failed: How many trials raised.
        infeasible: How many candidates made no model.
        missing: Why each trial, by its key, has no result, although it was tried several times. A study with missing
            trials is incomplete.
        report: The study's report.
    """

    study_id: int
    name: str
    state: StudyState
    trials: int
    known: int
    failed: int
    infeasible: int
    missing: dict[str, str]
    report: Report


def run_study_file(
    study_file: str | Path | Mapping[str, Any],
    *,
    db: str | Path | None = None,
    profile: str | None = None,
    executor: Executor = "ray",
    workers: int | None = None,
    address: str | None = None,
    storage: str | None = None,
    retry_failed: bool = False,
    quiet: bool = True,
    unchecked: bool = False,
    join: bool = False,
    overrides: Overrides = None,
    log_to: Sequence[str] = (),
    backup_every: float | None = None,
    slurm: Sequence[str] = (),
) -> StudyResult:
    """Runs a study, or goes on with it: a trial that the ledger holds never runs again.

    Args:
        study_file: The path of a study's file, the name of a shipped study, or the mapping that a file would hold.
        db: The ledger, a file or an SQLAlchemy URL; ./deltalab.db if None.
        profile: One of the study's profiles.
        executor: `ray`; `inline`, which runs one stack at a time without Ray; or `slurm`, which submits jobs.
        workers: Stacks of trials at a time; as many as the resources allow if None.
        address: The address of a Ray cluster, whose machines must share the folder `storage`; None for a Ray of this
            machine.
        storage: The folder or the URL of weights and checkpoints; a folder beside the ledger if None.
        retry_failed: Whether the trials run again that raised.
        quiet: Whether nothing is printed.
        unchecked: Whether rules run that fail their checks or have not been checked. The report says so.
        join: Whether to take part in the study that another driver runs with this ledger, and to go on in that driver's
            place if it dies.
        overrides: Settings in place of the file's, such as {"train.steps": 100, "seeds": 7}, or words "seeds=7"
            (`deltalab.study.specs.overrides`). If they change what is computed, they make another study of the same
            name.
        log_to: Loggers, such as wandb, mlflow or tensorboard, that get every run and the report (`deltalab.loggers`). A
            driver that has joined logs nothing.
        backup_every: The seconds between two backups of the ledger (`store.copies.backup.Backups`); None for none. A
            driver that has joined makes none.
        slurm: What each job asks of Slurm, as words such as "partition=gpu" (`deltalab.study.running.slurm.options`).

    Returns:
        How the study ended, with its report. A trial that raises is recorded as failed.

    Raises:
        InputError: The study is not valid, this machine cannot run it, or a rule fails its checks.
        Busy: Another driver runs the study.
        LedgerGone: The ledger's file was deleted, moved or replaced meanwhile. The message names the file that has all
            that it held.
        KeyboardInterrupt: The process got SIGINT, in the main thread. A second signal ends the process at once.
        SystemExit: The process got SIGTERM, SIGHUP or SIGQUIT, in the main thread; the code is 143, 129 or 131.
    """
    plan = plan_study(study_file, profile=profile, overrides=overrides)
    settings = RunSettings(
        db=db,
        executor=executor,
        workers=workers,
        address=address,
        storage=storage,
        retry_failed=retry_failed,
        quiet=quiet,
        unchecked=unchecked,
        join=join,
        log_to=log_to,
        backup_every=backup_every,
        slurm=slurm,
    )
    return run_study(plan, settings)


def run_study(plan: Plan, settings: RunSettings) -> StudyResult:
    """Runs the study of a plan, as `run_study_file` runs that of a file."""
    require_runnable(plan, settings)

    def execute(schedule: StackSource, runs: Path | str, progress: ProgressBars) -> None:
        if settings.executor == "inline":
            _inline(schedule, runs, progress)
        elif settings.executor == "slurm":
            _with_slurm(schedule, runs, progress, settings)
        else:
            _with_ray(schedule, runs, progress, workers=settings.workers, address=settings.address)

    warm_starts.require_recorded(plan, settings.db)
    storage = runs_at(settings.storage) if settings.storage else None
    with LogTo(settings.log_to, quiet=settings.quiet) as logs:
        if not settings.unchecked:
            verdict.demand(plan.rules, quiet=settings.quiet)
            demand_modules([block for model in plan.models() for _, block in model.kinds()])
        with signals.in_order(), Store.open(settings.db, create=not settings.join) as store:
            plan, planned = as_further_look(plan, store), plan
            for note in plan.notes[len(planned.notes) :]:
                _log.warning(f"study '{plan.spec.name}': {note}")
            recorded = {study.identity for study in store.studies() if study.name == plan.spec.name}
            if recorded and plan.identity not in recorded and (line := known_trials(plan, store)):
                _log.warning(f"study '{plan.spec.name}': {line}")
            runs = storage or store.folder / "runs"
            while True:
                if settings.join:
                    ended = _take_part(plan, store, storage, execute, quiet=settings.quiet)
                    if isinstance(ended, StudyResult):
                        return ended
                    runs = ended
                try:
                    return _drive(plan, store, runs, execute, logs, settings)
                except Busy:  # Another driver that had joined took the study over first.
                    if not settings.join:
                        raise


Execute = Callable[[StackSource, Path | str, ProgressBars], None]
"""Runs all stacks of a source, with the folder or the URL of weights, and shows them."""


def _drive(
    plan: Plan, store: Store, runs: Path | str, execute: Execute, logs: LogTo, settings: RunSettings
) -> StudyResult:
    """Runs a study as its holder. Raises `Busy` if another driver holds the study."""
    if isinstance(runs, Path):
        try:
            runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{runs}: no folder for weights can be made: {error.strerror}") from None
    study_id = store.begin_study(
        plan.spec.name,
        plan.profile,
        plan.identity,
        plan.spec.model_dump(mode="json"),
        arm_records(plan),
        provenance(plan, verdict.unchecked(plan.rules) if settings.unchecked else {}),
        runs=str(runs),
    )
    state: StudyState = "interrupted"
    activity = DriverActivity()
    with (
        Backups(store, settings.backup_every),
        Heartbeat(lambda: store.beat(study_id, activity.status().to_json())),
    ):
        try:
            record_delivered(store, study_id)
            if settings.retry_failed:
                for key in {row.key for row in store.trials(study_id) if row.state == "failed"}:
                    store.forget_trial(key)
            logs.follow(store, study_id)
            schedule = Schedule(plan, store, study_id, interrupted_stacks(runs))
            with ProgressBars(schedule, activity, quiet=settings.quiet) as progress, Sharing(schedule, progress):
                execute(schedule, runs, progress)
            if schedule.missing:
                state = "incomplete"
            elif not schedule.done:  # Ray was told to stop.
                raise KeyboardInterrupt
            else:
                state = "failed" if schedule.failures else "done"
        finally:
            given_up = schedule.given_up if state == "incomplete" else ()
            store.finish_study(study_id, state, activity.total, given_up)
    answer = report(store, study_id)
    keep_best(store, study_id, find_best_arm(answer))
    store.require_in_place()
    logs.finish(answer)
    return StudyResult(
        study_id,
        plan.spec.name,
        state=state,
        trials=schedule.completed,
        known=schedule.known,
        failed=schedule.failures,
        infeasible=schedule.infeasible,
        missing=schedule.missing,
        report=answer,
    )


def _take_part(
    plan: Plan, store: Store, storage: Path | str | None, execute: Execute, *, quiet: bool
) -> StudyResult | Path | str:
    """Takes stacks from the driver that runs the study, until that driver ends the study.

    If that driver has died, returns the folder or the URL of its weights, so that this driver goes on there.
    """
    found = driver_of(store, plan)
    if isinstance(found, Study):  # Its driver may have ended it while this one started.
        _log.warning(f"study '{plan.spec.name}': has ended; nothing is left to take part in")
        return _taken_part(plan, store, found.id, delivered=0)
    driver, lives = found
    runs = weights_folder(storage, driver)
    if not lives:
        _log.warning(f"study '{plan.spec.name}': its driver {driver.where} is gone; this one goes on in its place")
        return runs
    _log.warning(f"study '{plan.spec.name}': takes part in what runs {driver.where}")
    with (
        JoinedStacks(plan, store, driver.study_id, runs) as joined,
        JoinedProgressBars(joined, quiet=quiet) as progress,
    ):
        execute(joined, runs, progress)
    if joined.gone:
        _log.warning(f"study '{plan.spec.name}': its driver {driver.where} is gone; this one goes on in its place")
        return runs
    return _taken_part(plan, store, driver.study_id, delivered=joined.delivered)


def _taken_part(plan: Plan, store: Store, study_id: int, *, delivered: int) -> StudyResult:
    """Returns the result of a study that another driver has ended, and for which this one ran `delivered` trials."""
    state = store.study(study_id).state
    if state == "interrupted":
        _log.warning(f"study '{plan.spec.name}': its driver was told to stop; `deltalab study run` goes on with it")
    trials = {row.key: row.state for row in store.trials(study_id)}
    ended = [trial for trial in trials.values() if trial != "infeasible"]
    return StudyResult(
        study_id,
        plan.spec.name,
        state=state,
        trials=len(ended),
        known=len(ended) - delivered,
        failed=ended.count("failed"),
        infeasible=len(trials) - len(ended),
        missing={},
        report=report(store, study_id),
    )


def arm_records(plan: Plan) -> list[ArmRecord]:
    """Makes the records of the arms for the ledger, each with its configuration on each task.

    A change that is not the same on all tasks, such as the width of a matched arm, stands under KEY@TASK.
    """
    records = []
    for name in plan.names:
        arms = [arm for arm in plan.arms if arm.name == name]
        change = {}
        for key in dict.fromkeys(key for arm in arms for key in arm.change):
            by_task = {arm.task: arm.change.get(key) for arm in arms}
            if all(value == arms[0].change.get(key) for value in by_task.values()):
                change[key] = arms[0].change[key]
            else:
                change |= {f"{key}@{task}": value for task, value in by_task.items() if value is not None}
        records.append(ArmRecord(name, arms[0].is_base, change, {arm.task: arm.config for arm in arms}))
    return records


def _inline(schedule: StackSource, runs: Path | str, progress: ProgressBars) -> None:
    """Executes stacks one after the other, without Ray."""
    if idle := schedule.plan.spec.resources.idle(torch.cuda.device_count()):
        _log.warning(idle)
    wanted = schedule.plan.spec.resources
    with make_worker(runs, threads=wanted.threads, memory=wanted.bytes) as worker:
        while True:
            stack = schedule.next(places=1)
            if not stack:
                if schedule.ended:
                    return
                time.sleep(WAIT)
                continue
            progress.started(stack)
            try:
                for record in worker.execute(stack, partial(_reached, progress, stack, worker)):
                    schedule.finished(record)
            except Lost as lost:
                schedule.unfinished(stack, lost)
                progress.finished(stack)
            else:
                progress.finished(stack, worker.device)


def _reached(progress: ProgressBars, stack: Sequence[Job], worker: Worker, step: int) -> None:
    """Shows the step that a stack has reached."""
    progress.advanced(stack, step, worker.device)


def _with_ray(
    schedule: StackSource, runs: Path | str, progress: ProgressBars, *, workers: int | None, address: str | None
) -> None:
    """Executes stacks on Ray; starts no cluster if nothing is left to do."""
    schedule.refresh()
    if schedule.done:
        return
    from deltalab.study.running.ray.driver import run_all

    run_all(schedule, runs, progress, workers=workers, address=address)


def _with_slurm(schedule: StackSource, runs: Path | str, progress: ProgressBars, settings: RunSettings) -> None:
    """Executes stacks in jobs of Slurm; submits none if nothing is left to do."""
    schedule.refresh()
    if schedule.done:
        return
    from deltalab.study.running.slurm.driver import run_all

    assert isinstance(runs, Path)
    assert settings.workers is not None
    run_all(schedule, runs, progress, jobs=read_options(settings.slurm), places=settings.workers)


def provenance(plan: Plan, unchecked: dict[str, str]) -> dict[str, Any]:
    """Lists the code, versions, hardware and tasks of a study, by which a reader can judge and repeat it.

    Args:
        plan: The study.
        unchecked: The rules that have not passed their checks, with the reasons.
    """
    packages = ["deltalab", "torch", "numpy", "ray", "optuna", "sqlalchemy"]
    return {
        "git": _git(),
        "numerics": NUMERICS,
        **({"unchecked": unchecked} if unchecked else {}),
        **({"overrides": plan.overrides} if plan.overrides else {}),
        "versions": {"python": sys.version.split()[0], **{name: _version(name) for name in packages}},
        "hardware": {
            **hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "cpus": os.cpu_count(),
            "gpus": torch.cuda.device_count(),
        },
        "command": [without_password(word) for word in sys.argv],
        "rules": {name: rule_plugin(name).hash for name in plan.rules},
        "tasks": {
            name: {
                "metric": task.metric,
                "maximize": task.maximize,
                "chance": task.chance,
                "bounds": task.bounds,
                "margin": plan.margin(task),
                "version": task.version,
                "parameters": asdict(task),
                "fingerprint": task.fingerprint(),
                **({"length": task.length} if plan.spec.scales else {}),
            }
            for name, task in plan.tasks.items()
        },
        **({"compare": list(plan.further)} if plan.further else {}),
    }


def _version(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed. A study that runs inline needs no Ray."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of the working folder; None outside of a repository."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None
