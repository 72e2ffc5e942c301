"""Runs a study to its end: the schedule decides, workers execute, the ledger remembers."""

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
from typing import Any, Literal

import torch

from deltalab.authoring import verdict
from deltalab.errors import InputError
from deltalab.registry import rule_plugin
from deltalab.store import ArmRecord, Busy, Heartbeat, Store
from deltalab.store.database import without_password
from deltalab.store.models import StudyState
from deltalab.store.shelf import keep_best
from deltalab.study.planning import warm_starts
from deltalab.study.planning.make import plan_study
from deltalab.study.planning.plan import Plan
from deltalab.study.reports.best_arm import best
from deltalab.study.reports.report import Report, report
from deltalab.study.running import signals
from deltalab.study.running.activity import Account
from deltalab.study.running.external_loggers import LogTo
from deltalab.study.running.progress_bars import Progress
from deltalab.study.running.ray_folders import temporary
from deltalab.study.running.schedule import Schedule, Stacks
from deltalab.study.running.sharing import Joined, JoinedProgress, Sharing, collect, held, weights
from deltalab.study.running.weights_at_url import cut_off, runs_at, worker
from deltalab.study.specs.overrides import Given
from deltalab.study.workers.jobs import Job, Lost
from deltalab.study.workers.worker import Worker
from deltalab.training.train import NUMERICS, hardware

_log = logging.getLogger("deltalab")

WAIT = 0.1
"""Seconds between two looks for a stack, while one waits to be tried again."""


@dataclass(frozen=True)
class StudyResult:
    """How a study ended.

    known: trials that the ledger already had. failed: trials that raised. infeasible: candidates that made no model.
    missing: why each trial, by its key, has no result, although it was tried several times; the study is incomplete.
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


def run_study(
    path: str | Path | Mapping[str, Any] | Plan,
    *,
    db: str | Path | None = None,
    profile: str | None = None,
    executor: Literal["ray", "inline"] = "ray",
    workers: int | None = None,
    address: str | None = None,
    storage: str | None = None,
    retry_failed: bool = False,
    quiet: bool = True,
    unchecked: bool = False,
    join: bool = False,
    overrides: Given = None,
    log_to: Sequence[str] = (),
) -> StudyResult:
    """Runs a study, or goes on with it: a trial that the ledger holds never runs again.

    path: the file of a study, the name of a shipped one, or the mapping that a file would hold, with `profile` one of
    its own; or a plan.
    overrides: settings in place of the file's, such as {"train.steps": 100, "seeds": 7}, or words "seeds=7"
    (`deltalab.study.specs.overrides`). Where they change what is computed, this is another study of the same name.
    join: take part in the study that another driver runs with this database, and go on in its place if it dies.
    db: a file or an SQLAlchemy URL, ./deltalab.db where None. executor: `inline` runs one stack at a time, without Ray.
    workers: stacks of trials at a time; None is as many as the resources allow. address: a Ray cluster, whose machines
    must share the folder `storage`. retry_failed: run the trials again that raised.
    unchecked: run rules that fail their checks or have not been checked, and say so in the report.
    log_to: loggers, such as wandb, mlflow or tensorboard, that get every run and the report (`deltalab.loggers`); a
    driver that has joined logs nothing.
    Raises `InputError` for a study that is not valid or that this machine cannot run, and for a rule that fails its
    checks, and `Busy` where another driver runs the study; a trial that raises is recorded. SIGINT raises
    `KeyboardInterrupt` and SIGTERM `SystemExit(143)`, in the main thread; a second signal ends the process at once.
    """
    if isinstance(path, Plan):
        plan = path
        if overrides:
            raise InputError("overrides go with a study's file, its name or its mapping: a plan has them in place")
    else:
        plan = plan_study(path, profile=profile, overrides=overrides)
    if executor not in ("ray", "inline"):
        raise InputError(f"executor must be ray or inline, not {executor!r}")
    if address is not None and storage is None:
        raise InputError("--address: the cluster's machines need a shared folder: give it with --storage")
    if workers is not None and workers < 1:
        raise InputError(f"--workers must be at least 1, not {workers}")
    if executor == "inline" and (address is not None or (workers or 1) > 1):
        raise InputError("--executor inline runs one stack at a time: --workers and --address are Ray's")
    if executor == "ray":
        temporary()
    gpu = plan.spec.resources.gpu
    for arm in plan.arms:
        device, where = arm.config["train"]["device"], "base" if arm.is_base else f"arms.{arm.name}"
        if gpu and device != "cpu" and address is None and not torch.cuda.is_available():
            raise InputError(f"{plan.where}: resources: a stack wants {gpu:g} GPU; this machine has none")
        if not gpu and device == "cuda" and executor == "ray":
            raise InputError(f"{plan.where}: {where}: train.device: cuda needs resources: {{gpu: 1}}")

    def execute(schedule: Stacks, runs: Path | str, progress: Progress) -> None:
        if executor == "inline":
            _inline(schedule, runs, progress)
        else:
            _with_ray(schedule, runs, progress, workers=workers, address=address)

    warm_starts.demand(plan, db)
    given = runs_at(storage) if storage else None
    with LogTo(log_to, quiet=quiet) as logs:
        if not unchecked:
            verdict.demand(plan.rules, quiet=quiet)
        with signals.in_order(), Store.open(db, create=not join) as store:
            runs = given or store.folder / "runs"
            while True:
                if join:
                    found = _take_part(plan, store, given, execute, quiet=quiet)
                    if isinstance(found, StudyResult):
                        return found
                    runs = found
                try:
                    return _drive(
                        plan,
                        store,
                        runs,
                        execute,
                        logs,
                        retry_failed=retry_failed,
                        unchecked=unchecked,
                        quiet=quiet,
                    )
                except Busy:  # another one that had joined took the study over first
                    if not join:
                        raise


Execute = Callable[[Stacks, Path | str, Progress], None]


def _drive(
    plan: Plan,
    store: Store,
    runs: Path | str,
    execute: Execute,
    logs: LogTo,
    *,
    retry_failed: bool,
    unchecked: bool,
    quiet: bool,
) -> StudyResult:
    """Runs a study as its holder. Raises `Busy` where another driver does."""
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
        _provenance(plan, verdict.unchecked(plan.rules) if unchecked else {}),
        runs=str(runs),
    )
    state: StudyState = "interrupted"
    account = Account()
    with Heartbeat(lambda: store.beat(study_id, account.doing().to_json())):
        try:
            collect(store, study_id)
            if retry_failed:
                for key in {row.key for row in store.trials(study_id) if row.state == "failed"}:
                    store.forget_trial(key)
            logs.follow(store, study_id)
            schedule = Schedule(plan, store, study_id, cut_off(runs))
            with Progress(schedule, account, quiet=quiet) as progress, Sharing(schedule, progress):
                execute(schedule, runs, progress)
            if schedule.missing:
                state = "incomplete"
            elif not schedule.done:  # Ray was told to stop
                raise KeyboardInterrupt
            else:
                state = "failed" if schedule.failures else "done"
        finally:
            store.finish_study(study_id, state, account.total, schedule.given_up if state == "incomplete" else ())
    found = report(store, study_id)
    keep_best(store, study_id, best(found))
    logs.finish(found)
    return StudyResult(
        study_id,
        plan.spec.name,
        state=state,
        trials=schedule.completed,
        known=schedule.known,
        failed=schedule.failures,
        infeasible=schedule.infeasible,
        missing=schedule.missing,
        report=found,
    )


def _take_part(
    plan: Plan, store: Store, given: Path | str | None, execute: Execute, *, quiet: bool
) -> StudyResult | Path | str:
    """Takes stacks from the driver that runs the study, until that ends it.

    Where it has died, returns the folder of its weights, so that this driver goes on there.
    """
    driver = held(store, plan)
    runs = weights(given, driver)
    _log.warning(f"study '{plan.spec.name}': takes part in what runs {driver.where}")
    with Joined(plan, store, driver.study_id, runs) as joined, JoinedProgress(joined, quiet=quiet) as progress:
        execute(joined, runs, progress)
    if joined.gone:
        _log.warning(f"study '{plan.spec.name}': its driver {driver.where} is gone; this one goes on in its place")
        return runs
    state = store.study(driver.study_id).state
    if state == "interrupted":
        _log.warning(f"study '{plan.spec.name}': its driver was told to stop; `platform study run` goes on with it")
    trials = {row.key: row.state for row in store.trials(driver.study_id)}
    ended = [trial for trial in trials.values() if trial != "infeasible"]
    return StudyResult(
        driver.study_id,
        plan.spec.name,
        state=state,
        trials=len(ended),
        known=len(ended) - joined.delivered,
        failed=ended.count("failed"),
        infeasible=len(trials) - len(ended),
        missing={},
        report=report(store, driver.study_id),
    )


def arm_records(plan: Plan) -> list[ArmRecord]:
    """The arms as the ledger keeps them, each with its configuration on each task.

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


def _inline(schedule: Stacks, runs: Path | str, progress: Progress) -> None:
    if idle := schedule.plan.spec.resources.idle(torch.cuda.device_count()):
        _log.warning(idle)
    wanted = schedule.plan.spec.resources
    with worker(runs, threads=wanted.threads, memory=wanted.bytes) as place:
        while True:
            stack = schedule.next(places=1)
            if not stack:
                if schedule.ended:
                    return
                time.sleep(WAIT)
                continue
            progress.started(stack)
            try:
                for record in place.execute(stack, partial(_reached, progress, stack, place)):
                    schedule.finished(record)
            except Lost as lost:
                schedule.unfinished(stack, lost)
                progress.finished(stack)
            else:
                progress.finished(stack, place.device)


def _reached(progress: Progress, stack: Sequence[Job], place: Worker, step: int) -> None:
    progress.advanced(stack, step, place.device)


def _with_ray(
    schedule: Stacks, runs: Path | str, progress: Progress, *, workers: int | None, address: str | None
) -> None:
    # Start no cluster where nothing is left to do.
    schedule.look()
    if schedule.done:
        return
    from deltalab.study.running.ray_driver import run_all

    run_all(schedule, runs, progress, workers=workers, address=address)


def _provenance(plan: Plan, unchecked: dict[str, str]) -> dict[str, Any]:
    """Where and with what the study ran: what a reader needs to judge and repeat it.

    unchecked: rules that have not passed their checks, with the reason.
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
                "version": task.version,
                "parameters": asdict(task),
                "fingerprint": task.fingerprint(),
                **({"length": task.length} if plan.spec.scales else {}),
            }
            for name, task in plan.tasks.items()
        },
    }


def _version(package: str) -> str | None:
    """None for a package that is not installed, such as Ray where a study runs inline."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of the working folder; None outside a repository."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None
