"""How a study runs, and whether this machine can run it so: nothing of it changes what is computed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch

from deltalab import trust
from deltalab.authoring.files import study_folder
from deltalab.engines.machines import version_of
from deltalab.errors import InputError, unknown
from deltalab.ops.peers.scans import PACKAGES, lacks
from deltalab.study.planning.plan import Plan
from deltalab.study.running.ray.folders import temporary
from deltalab.study.running.slurm.options import require_slurm
from deltalab.study.searching.proposers import own_file
from deltalab.study.specs.sections.budget import EVOLUTION

MOST_BETWEEN_BACKUPS = 7 * 24 * 3600
"""The most seconds between two backups."""

Executor = Literal["ray", "inline", "slurm"]


@dataclass(frozen=True)
class RunSettings:
    """How a study runs, which changes nothing that it computes: the arguments of `run_study` with these names."""

    db: str | Path | None = None
    executor: Executor = "ray"
    workers: int | None = None
    address: str | None = None
    storage: str | None = None
    retry_failed: bool = False
    quiet: bool = True
    unchecked: bool = False
    join: bool = False
    log_to: Sequence[str] = ()
    backup_every: float | None = None
    slurm: Sequence[str] = ()


def require_settings(settings: RunSettings) -> None:
    """Raises `InputError` if the settings do not go together, whatever the study."""
    executor, address, workers = settings.executor, settings.address, settings.workers
    if executor not in get_args(Executor):
        raise unknown("executor", executor, get_args(Executor), where="--executor")
    if executor == "slurm":
        require_slurm(settings.slurm, storage=settings.storage, workers=workers, address=address)
    elif settings.slurm:
        raise InputError("--slurm is for --executor slurm")
    if address is not None and settings.storage is None:
        raise InputError("--address: the cluster's machines need a shared folder: give it with --storage")
    if workers is not None and workers < 1:
        raise InputError(f"--workers must be at least 1, not {workers}")
    if settings.backup_every is not None and not 1 <= settings.backup_every <= MOST_BETWEEN_BACKUPS:
        raise InputError(f"--backup-every must be from 1s to 168h, not {settings.backup_every:g} s")
    if executor == "inline" and (address is not None or (workers or 1) > 1):
        raise InputError("--executor inline runs one stack at a time: --workers and --address are Ray's")


def require_runnable(plan: Plan, settings: RunSettings) -> None:
    """Raises `InputError` if the settings do not go together, or if this machine cannot run the study."""
    require_settings(settings)
    if plan.spec.engine is not None:
        version_of(plan.spec.engine.name)
        if "://" in (settings.storage or "").removeprefix("file://"):
            raise InputError(f"--storage {settings.storage}: an engine's checkpoints need a folder, not a URL")
    if settings.executor == "ray":
        temporary()
    if plan.spec.search is not None and plan.spec.search.proposals not in (None, EVOLUTION):
        try:
            file = study_folder.study_file(plan.study_file)
        except InputError:
            file = None  # The study is a mapping, which the caller wrote.
        if file is not None:
            trust.require(file, "its search.proposals runs a program")
        if (own := own_file(plan.spec.search.proposals)) is not None:
            trust.require(own, f"search.proposals '{plan.spec.search.proposals}' runs it")
    gpu, here = plan.spec.resources.gpu, settings.address is None and settings.executor != "slurm"
    for arm in plan.arms:
        device, where = arm.config["train"]["device"], "base" if arm.is_base else f"arms.{arm.name}"
        if gpu and device != "cpu" and here and not torch.cuda.is_available():
            raise InputError(f"{plan.study_file}: resources: a stack wants {gpu:g} GPU; this machine has none")
        if here and (backend := arm.config["model"].get("backend")) in PACKAGES:
            lacks(backend, where=f"{plan.study_file}: {where}: model.backend {backend}")
        if not gpu and device == "cuda" and settings.executor != "inline":
            raise InputError(f"{plan.study_file}: {where}: train.device: cuda needs resources: {{gpu: 1}}")
