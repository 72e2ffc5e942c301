"""Runs a study to its end: the schedule decides, Ray Tune executes, the ledger remembers."""

import fcntl
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from deltalab.authoring import verdict
from deltalab.errors import InputError
from deltalab.registry import rule_plugin
from deltalab.store import ArmRecord, Store
from deltalab.study.plan import Plan, make_plan
from deltalab.study.progress import Progress
from deltalab.study.report import Report, report
from deltalab.study.schedule import Schedule
from deltalab.study.spec import load_study
from deltalab.study.trial import cut_off, execute
from deltalab.training.train import hardware

_log = logging.getLogger("deltalab")


@dataclass(frozen=True)
class StudyResult:
    """How a study ended.

    known: trials that the ledger already had. failed: trials that raised. infeasible: candidates that made no model.
    """

    study_id: int
    name: str
    trials: int
    known: int
    failed: int
    infeasible: int
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
) -> StudyResult:
    """Runs a study, or goes on with it: a trial that the ledger holds never runs again.

    path: the file of a study, the name of a shipped one, or the mapping that a file would hold, with `profile` one of
    its own; or a plan.
    db: a file or an SQLAlchemy URL, ./deltalab.db where None. executor: `inline` runs in this process, without Ray.
    workers: stacks of trials at a time; None is as many as the resources allow. address: a Ray cluster, whose machines
    must share the folder `storage`. retry_failed: run the trials again that raised.
    unchecked: run rules that fail their checks or have not been checked, and say so in the report.
    Raises `InputError` for a study that is not valid or that this machine cannot run, and for a rule that fails its
    checks; a trial that raises is recorded.
    """
    if isinstance(path, Plan):
        plan = path
    else:
        where = "study" if isinstance(path, Mapping) else str(path)
        plan = make_plan(load_study(path, profile=profile), profile=profile, where=where)
    if executor not in ("ray", "inline"):
        raise InputError(f"executor must be ray or inline, not {executor!r}")
    if address is not None and storage is None:
        raise InputError("--address: the cluster's machines need a shared folder: give it with --storage")
    if workers is not None and workers < 1:
        raise InputError(f"--workers must be at least 1, not {workers}")
    if executor == "inline" and (address is not None or (workers or 1) > 1):
        raise InputError(
            "--executor inline runs one stack at a time, in this process: --workers and --address are Ray's"
        )
    gpu = plan.spec.resources.gpu
    for arm in plan.arms:
        device, where = arm.config["train"]["device"], "base" if arm.is_base else f"arms.{arm.name}"
        if gpu and device != "cpu" and address is None and not torch.cuda.is_available():
            raise InputError(f"{plan.where}: resources: a stack wants {gpu:g} GPU; this machine has none")
        if not gpu and device == "cuda" and executor == "ray":
            raise InputError(f"{plan.where}: {where}: train.device: cuda needs resources: {{gpu: 1}}")
    if not unchecked:
        verdict.demand(plan.rules, quiet=quiet)
    with Store.open(db) as store:
        runs = Path(storage).resolve() if storage else store.folder / "runs"
        with _alone(runs, plan):
            study_id = store.begin_study(
                plan.spec.name,
                plan.profile,
                plan.identity,
                plan.spec.model_dump(mode="json"),
                arm_records(plan),
                _provenance(plan, verdict.unchecked(plan.rules) if unchecked else {}),
            )
            if retry_failed:
                for key in {row.key for row in store.trials(study_id) if row.state == "failed"}:
                    store.forget_trial(key)
            schedule = Schedule(plan, store, study_id, cut_off(runs))
            state: Literal["done", "failed", "interrupted"] = "interrupted"
            try:
                with Progress(schedule, quiet=quiet) as progress:
                    if executor == "inline":
                        _inline(schedule, runs, progress)
                    else:
                        _with_ray(schedule, runs, progress, workers=workers, address=address)
                if not schedule.done:  # Ray Tune catches Ctrl-C and returns as if all were done
                    raise KeyboardInterrupt
                state = "failed" if schedule.failures else "done"
            finally:
                store.finish_study(study_id, state)
        return StudyResult(
            study_id,
            plan.spec.name,
            trials=schedule.completed,
            known=schedule.known,
            failed=schedule.failures,
            infeasible=schedule.infeasible,
            report=report(store, study_id),
        )


@contextmanager
def _alone(runs: Path, plan: Plan) -> Iterator[None]:
    """Makes the folder and holds a lock in it, so that no second driver does the same work.

    The lock dies with the process.
    Raises `InputError` where another process holds it, and where the folder cannot be made.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
        held = (runs / f".{plan.identity[:16]}.lock").open("w")
    except OSError as error:
        raise InputError(f"{runs}: no folder for weights can be made: {error.strerror}") from None
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"study '{plan.spec.name}' is running already, in another process") from None
        yield


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


def _inline(schedule: Schedule, runs: Path, progress: Progress) -> None:
    if idle := schedule.plan.spec.resources.idle(torch.cuda.device_count()):
        _log.warning(idle)
    threads = torch.get_num_threads()
    try:
        while stack := schedule.next(places=1):
            progress.started(stack)
            wanted = schedule.plan.spec.resources.threads
            for record in execute(stack, runs, threads=wanted, watch=partial(progress.advanced, stack)):
                schedule.finished(record)
            progress.finished(stack)
    finally:
        torch.set_num_threads(threads)


def _with_ray(schedule: Schedule, runs: Path, progress: Progress, *, workers: int | None, address: str | None) -> None:
    # Start no cluster where nothing is left to do.
    schedule.look()
    if schedule.done:
        return
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
    # Workers stay in the working folder, since a study may name a corpus by a relative path.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    from deltalab.study.ray_tune import run_all

    run_all(schedule, runs, progress, workers=workers, address=address)


def _provenance(plan: Plan, unchecked: dict[str, str]) -> dict[str, Any]:
    """Where and with what the study ran: what a reader needs to judge and repeat it.

    unchecked: rules that have not passed their checks, with the reason.
    """
    packages = ["deltalab", "torch", "numpy", "ray", "optuna", "sqlalchemy"]
    return {
        "git": _git(),
        **({"unchecked": unchecked} if unchecked else {}),
        "versions": {"python": sys.version.split()[0], **{name: _version(name) for name in packages}},
        "hardware": {
            **hardware(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
            "cpus": os.cpu_count(),
            "gpus": torch.cuda.device_count(),
        },
        "command": [_without_password(word) for word in sys.argv],
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


def _without_password(word: str) -> str:
    """
    >>> _without_password("--db=postgresql://me:secret@host/lab?password=secret")
    '--db=postgresql://me:***@host/lab?password=***'
    """
    return re.sub(r"(://[^/@\s]*:)[^@\s]*(?=@)|(\bpassword=)[^&\s]*", r"\1\2***", word)


def _git() -> dict[str, Any] | None:
    """The commit of the working folder; None outside a repository."""

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None
