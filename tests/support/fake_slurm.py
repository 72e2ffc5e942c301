"""A Slurm of one machine, whose jobs are processes.

`FAKE_SLURM` names the folder with a file for each job. `FakeSlurm` makes that folder and the programs of Slurm, which
call the functions of their names here. It does to jobs what a cluster does: it preempts them and loses them.
"""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

NAMES = ("sbatch", "srun", "scancel", "sacct", "scontrol", "sinfo")
PARTITIONS = ("cpu", "gpu")
GRACE = 0.3
"""Seconds between SIGTERM and SIGKILL of a job that is cancelled or preempted."""


@contextmanager
def job(number: str, folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """The record of a job, which may be changed in the block."""
    file = (folder or Path(os.environ["FAKE_SLURM"])) / f"{number}.job"
    with file.open("r+") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        content = json.load(opened)
        yield content
        opened.seek(0)
        opened.truncate()
        json.dump(content, opened)


def sbatch(script: str) -> None:
    text = Path(script).read_text()
    flags = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M))
    if flags.get("partition", "cpu") not in PARTITIONS:
        sys.exit("sbatch: error: Batch job submission failed: Invalid partition name specified")
    folder = Path(os.environ["FAKE_SLURM"])
    number = 100
    while True:
        number += 1
        try:
            file = (folder / f"{number}.job").open("x")
        except FileExistsError:
            continue
        break
    with file:
        json.dump({"state": "PENDING", "flags": flags, "text": text, "tasks": [], "group": None, "starts": 0}, file)
    subprocess.Popen(
        [sys.executable, __file__, "runs", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"Submitted batch job {number}")


def runs(number: str) -> None:
    """Runs a job, again and again for as long as it is put back into the queue."""
    while True:
        with job(number) as about:
            if about["state"] != "PENDING":
                return
            about["starts"] += 1
            tasks = about["flags"].get("ntasks-per-node", "1")
            logs = [about["flags"][kind].strip("'").replace("%j", number) for kind in ("output", "error")]
            environment = os.environ | {"SLURM_JOB_ID": number, "SLURM_NTASKS": tasks, "SLURM_JOB_NUM_NODES": "1"}
            with open(logs[0], "a") as out, open(logs[1], "a") as error:
                process = subprocess.Popen(
                    ["bash", "-s"], stdin=subprocess.PIPE, stdout=out, stderr=error, env=environment, process_group=0
                )
            about |= {"state": "RUNNING", "group": process.pid, "tasks": [], "again": False}
        process.communicate(about["text"].encode())
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with job(number) as about:
            if about["again"]:
                about["state"] = "PENDING"
            elif about["state"] == "RUNNING":
                about["state"] = "COMPLETED" if process.returncode == 0 else "FAILED"


def srun(*words: str) -> None:
    number, tasks = os.environ["SLURM_JOB_ID"], []
    logs = [words[words.index(name) + 1].replace("%j", number) for name in ("--output", "--error")]
    command = words[words.index("--error") + 2 :]
    for rank in map(str, range(int(os.environ["SLURM_NTASKS"]))):
        with open(logs[0].replace("%t", rank), "a") as out, open(logs[1].replace("%t", rank), "a") as error:
            environment = os.environ | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
            tasks.append(subprocess.Popen(command, stdout=out, stderr=error, env=environment))
    with job(number) as about:
        about["tasks"] = [task.pid for task in tasks]
    sys.exit(max(abs(task.wait()) for task in tasks))


def send(about: dict[str, Any], number: int) -> None:
    """Sends a signal to the tasks of a job."""
    for task in about["tasks"]:
        with suppress(ProcessLookupError):
            os.kill(task, number)


def kill(about: dict[str, Any]) -> None:
    """Kills all processes of a job."""
    if about["group"] is not None:
        with suppress(ProcessLookupError):
            os.killpg(about["group"], signal.SIGKILL)


def scancel(*numbers: str) -> None:
    for number in numbers:
        with job(number) as about:
            if about["state"] not in ("PENDING", "RUNNING"):
                continue
            about |= {"state": "CANCELLED by 0", "again": False}
            send(about, signal.SIGTERM)
            time.sleep(GRACE)
            kill(about)


def sacct(*words: str) -> None:
    print("JobID|State|NodeList")
    for flag, number in pairwise(words):
        if flag == "-j":
            with job(number) as about:
                print(f"{number}|{about['state']}|here")
                print(f"{number}.0|{about['state']}|here")


def scontrol(verb: str, number: str) -> None:
    assert verb == "requeue", verb
    with job(number) as about:
        about["again"] = True


def sinfo(*_: str) -> None:
    print("\n".join(PARTITIONS))


class FakeSlurm:
    """The cluster, for a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder / "jobs", folder / "bin"
        self.folder.mkdir(parents=True)
        self.bin.mkdir()
        for name in NAMES:
            program = self.bin / name
            words = f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n'
            program.write_text(words)
            program.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        return {"FAKE_SLURM": str(self.folder), "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The record of each job, by its number."""
        found = {}
        for file in sorted(self.folder.glob("*.job")):
            with job(file.stem, self.folder) as about:
                found[file.stem] = about
        return found

    def loses(self, number: str) -> None:
        """A machine dies, and its job does not begin again."""
        with job(number, self.folder) as about:
            about["state"] = "NODE_FAIL"
            kill(about)

    def preempts(self, number: str, with_signal: int = signal.SIGTERM) -> None:
        """Another job needs the machine: after a word and a while the job goes back into the queue."""
        with job(number, self.folder) as about:
            send(about, with_signal)
            about["again"] = True
        time.sleep(2)
        with job(number, self.folder) as about:
            kill(about)

    def announces(self, number: str) -> None:
        """The time of a job is nearly over."""
        with job(number, self.folder) as about:
            send(about, signal.SIGUSR1)

    def ends(self) -> None:
        """Kills what still runs."""
        for number in self.jobs():
            with job(number, self.folder) as about:
                about |= {"state": "CANCELLED by 0", "again": False}
                kill(about)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
