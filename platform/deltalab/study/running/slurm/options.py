"""What each job of a study asks of Slurm, as words KEY=VALUE of the user, and whether this machine can submit jobs."""

import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from deltalab.errors import InputError, NotInstalled, unknown
from deltalab.study.specs.sections.resources import Resources

COMMANDS = ("sbatch", "srun", "scancel", "sacct")
"""The programs of Slurm that the driver calls, or the script of a job."""

WARNS = 90
"""Seconds before the end of a job's time at which Slurm sends the signal."""

LEAST_MINUTES = 5
MOST_MINUTES = 366 * 24 * 60
MOST_STACKS = 64

KEYS = ("partition", "time", "stacks", "account", "qos", "constraint", "exclude")

TIME = "give minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S, such as 4:00:00 or 1-12"


@dataclass(frozen=True)
class SlurmJobs:
    """What each job of a study asks of Slurm, beside the `resources` of the study.

    Attributes:
        partition: The partitions that a job may run in, with commas between them; None for the default one.
        time: Minutes until a job is put back into the queue.
        stacks: How many stacks run at a time in a job.
        account: The account that pays; None for the default one.
        qos: The quality of service; None for the default one.
        constraint: The features that a machine must have.
        exclude: The machines that no job may run on.
    """

    partition: str | None = None
    time: int = 60
    stacks: int = 1
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None

    def parameters(self, wanted: Resources) -> dict[str, Any]:
        """Returns the parameters of submitit for jobs with stacks that take `wanted`."""
        words = {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint", "exclude")}
        gpus = math.ceil(self.stacks * wanted.gpu)
        return {
            **{name: word for name, word in words.items() if word is not None},
            "time": self.time,
            "nodes": 1,
            "ntasks_per_node": self.stacks,
            "cpus_per_task": math.ceil(wanted.cpu),
            **({"gpus_per_node": gpus} if gpus else {}),
            **({"mem": self.stacks * wanted.memory} if wanted.memory else {}),
            "signal_delay_s": WARNS,
            "additional_parameters": {"requeue": True},
        }


def read_options(words: Sequence[str]) -> SlurmJobs:
    """Reads the words of `--slurm`.

    Raises:
        InputError: A word is no KEY=VALUE, a key is unknown or comes twice, or a value does not fit its key.

    Examples:
        >>> read_options(["partition=gpu", "time=1-12", "stacks=4"])
        SlurmJobs(partition='gpu', time=2160, stacks=4, account=None, qos=None, constraint=None, exclude=None)
    """
    given: dict[str, Any] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise InputError(f"'{word}' is no KEY=VALUE, such as partition=gpu", where="--slurm", key=word)
        if key not in KEYS:
            raise unknown("key", key, KEYS, where="--slurm")
        if key in given:
            raise InputError(f"{key} is given twice", where="--slurm", key=key)
        if not value or not value.isprintable():
            raise InputError(f"{key} has no value that can be printed", where="--slurm", key=key)
        given[key] = value
    if "time" in given:
        given["time"] = _minutes(given["time"])
    if "stacks" in given:
        given["stacks"] = _stacks(given["stacks"])
    return SlurmJobs(**given)


def require_slurm(words: Sequence[str], *, storage: str | None, workers: int | None, address: str | None) -> None:
    """Checks what `--executor slurm` needs.

    Args:
        words: The words of `--slurm`.
        storage: The folder of weights and checkpoints; None if the user gives none.
        workers: Stacks at a time; None if the user gives no number.
        address: The address of a Ray cluster; None if the user gives none.

    Raises:
        InputError: A setting is wrong or missing, or this machine cannot submit jobs.
    """
    jobs, where = read_options(words), "--executor slurm"
    if address is not None:
        raise InputError("--address is of a Ray cluster, and --executor slurm uses none")
    if storage is None or "://" in storage.removeprefix("file://"):
        raise InputError("jobs need a folder that all machines see: give it with --storage", where=where)
    if workers is None:
        raise InputError("say with --workers how many stacks run at a time", where=where)
    if workers < jobs.stacks:
        raise InputError(f"a job has stacks={jobs.stacks} at a time, and --workers is only {workers}", where="--slurm")
    if find_spec("submitit") is None:
        raise NotInstalled("needs submitit", "'deltalab[slurm]'", where=where)
    for command in COMMANDS:
        if shutil.which(command) is None:
            mend = "give the command on a machine from which you submit jobs"
            raise InputError(f"no {command} is found on the PATH", where=where, key=command, mend=mend)
    if jobs.partition is not None and (known := _partitions()):
        for name in jobs.partition.split(","):
            if name not in known:
                raise unknown("partition", name, known, where="--slurm")


def _minutes(text: str) -> int:
    """Reads a time limit in Slurm's notation, as whole minutes."""
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text)
    if match is None:
        raise InputError(f"time '{text}' is no time of Slurm's: {TIME}", where="--slurm", key="time")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:  # D-H, D-H:M or D-H:M:S
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # M or M:S
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    total = math.ceil(((int(days or 0) * 24 + hours) * 60 + minutes) + seconds / 60)
    if not LEAST_MINUTES <= total <= MOST_MINUTES:
        raise InputError(
            f"time must be from {LEAST_MINUTES} minutes to 366 days, not {text}", where="--slurm", key="time"
        )
    return total


def _stacks(text: str) -> int:
    """Reads how many stacks run at a time in a job."""
    if not (text.isdecimal() and 1 <= int(text[:9]) <= MOST_STACKS and len(text) < 9):
        problem = f"stacks must be a whole number from 1 to {MOST_STACKS}, not {text}"
        raise InputError(problem, where="--slurm", key="stacks")
    return int(text)


def _partitions() -> list[str]:
    """Returns the names of the partitions; none if `sinfo` does not tell them. Then sbatch refuses a wrong name."""
    try:
        told = subprocess.run(["sinfo", "--noheader", "--format=%R"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return sorted(set(told.stdout.split())) if told.returncode == 0 else []
