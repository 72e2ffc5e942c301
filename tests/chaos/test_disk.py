"""A disk that is full, under the ledger or under the weights: the study waits or ends, and records nothing wrong."""

import os
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from tests.chaos.disks import fill, small_disk
from tests.chaos.lab import Right, end, lab

pytestmark = pytest.mark.chaos
INLINE = ("--executor", "inline")


@pytest.mark.parametrize("what", ["ledger", "weights"])
@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_is_full_for_a_while(what: str, seed: int, right: Right, tell: Callable[..., None]) -> None:
    """Full from a random moment on, for seconds. Where the command ends with an error, it is given again."""
    rng = random.Random(f"{what} {seed}")
    with lab(None, *INLINE) as one, small_disk(one.folder / "disk", 4096):
        disk = one.folder / "disk"
        if what == "ledger":
            one.url = f"sqlite:///{disk / 'lab.db'}"
        one.more += ["--storage", str(disk if what == "weights" else one.folder / "runs")]
        process = one.start()
        freed = threading.Event()

        def full_for_a_while() -> None:
            time.sleep(rng.uniform(3, right.seconds))
            fill(disk, leave=rng.choice([0, 8192, 65536]))
            time.sleep(rng.uniform(1, 8))
            (disk / "ballast").unlink()
            freed.set()

        thread = threading.Thread(target=full_for_a_while)
        thread.start()
        process.wait(timeout=240)
        thread.join()
        one.finish(process)
        tell(f"disk full: {what}", seed=seed, events=1, commands=one.commands, **right.row(one))
        right.demand(one)


@pytest.mark.parametrize("kib", [4, 16, 150, 300, 500])
def test_files_that_may_not_grow_for_a_while(kib: int, right: Right, tell: Callable[..., None]) -> None:
    """A quota on the size of a file, as RLIMIT_FSIZE; each size strikes another write."""
    no_limit = resource.RLIM_INFINITY

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kib * 1024, no_limit))

    with lab(None, *INLINE) as one:
        process = one.start(limits=limit)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=right.seconds)
        for running in one.alive():
            with suppress(ProcessLookupError):
                resource.prlimit(running.pid, resource.RLIMIT_FSIZE, (no_limit, no_limit))
        one.finish(process)
        tell("disk full: quota on files", events=1, commands=one.commands, **right.row(one))
        right.demand(one)


def test_a_checkpoint_that_is_torn(right: Right, tell: Callable[..., None]) -> None:
    """A power cut leaves a file of the right name with half of its bytes: it is no reason to fail a trial."""
    with lab(None, *INLINE) as one:
        process = one.start()
        folder = one.folder / "runs" / "checkpoints"
        while not list(folder.glob("*.pt")):
            assert process.poll() is None, one.log()
            time.sleep(0.01)
        end(process)
        process.wait()
        one.follows()
        torn = list(folder.glob("*.pt"))
        for file in torn:
            os.truncate(file, file.stat().st_size // 2)
        one.finish(one.start())
        tell("checkpoint torn", events=len(torn), commands=one.commands, **right.row(one))
        right.demand(one)
