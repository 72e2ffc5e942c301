"""A place in a job of Slurm: executes one stack after another, as its driver says by a mailbox.

A place that Slurm is about to end says so, and the driver gives its stack to another place, which goes on from the
stack's checkpoint. The place needs no ledger: only the driver has one.
"""

import contextlib
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from deltalab.study.running.slurm import mailbox
from deltalab.study.running.slurm.mailbox import Mailbox
from deltalab.study.running.weights_at_url import make_worker
from deltalab.study.workers.jobs import Lost, record_to_json, stack_from_json
from deltalab.study.workers.worker import Worker, share

LOOKS = 0.5
"""Seconds between two looks at the order."""

ALONE = 900.0
"""Seconds without a sign of life of the driver after which a place ends. A driver may wait 300 s for its database."""


@dataclass(frozen=True)
class Place:
    """What submitit pickles for a job, and calls in each of the job's tasks.

    Attributes:
        folder: The driver's folder, which the job sees under the same path.
        runs: The folder of weights and checkpoints.
        threads: The threads of a trial.
        memory: Bytes that a stack may use; None for an equal share of the machine.
        gpu: The GPUs of a stack, or the share of one.
        stacks: The places of the job.
        alone: Seconds without a sign of life of the driver after which the place ends.
    """

    folder: Path
    runs: Path
    threads: int
    memory: int | None
    gpu: float
    stacks: int
    alone: float = ALONE

    def __call__(self) -> None:
        """Executes stacks until the driver has ended or is gone."""
        from submitit import JobEnvironment

        job = JobEnvironment()
        if self.gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus_of(job.global_rank, self.gpu, self.stacks)
        state = _State(Mailbox(self.folder, job.job_id, job.global_rank))
        driver = _Driver(self.folder, self.alone)
        memory = share(self.stacks) if self.memory is None else self.memory
        with warned(state), state, make_worker(self.runs, threads=self.threads, memory=memory) as worker:
            while driver.wants():
                if not state.work(worker, driver):
                    time.sleep(LOOKS)

    def checkpoint(self) -> Any:
        """Returns what a job runs that Slurm has put back into the queue: the same."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def gpus_of(rank: int, gpu: float, stacks: int) -> str:
    """Names the GPUs of a place among those of its job.

    Args:
        rank: The number of the place.
        gpu: The GPUs of a stack, or the share of one.
        stacks: The places of the job.

    Examples:
        >>> gpus_of(1, 2, 2), gpus_of(3, 0.5, 4)
        ('2,3', '1')
    """
    first = int(rank * gpu)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(stacks * max(1, int(gpu)))))
    return ",".join(visible.split(",")[first : first + max(1, int(gpu))])


@contextmanager
def warned(state: "_State") -> Iterator[None]:
    """Has the place tell its driver, in this block, of the signals by which Slurm announces a job's end.

    After SIGTERM the place works on, since Slurm grants some time. After the signal before the end of the job's time,
    submitit puts the job back into the queue and ends this process.
    """
    from submitit import JobEnvironment

    announced = JobEnvironment._usr_sig()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, announced)}

    def tell(number: int, frame: FrameType | None) -> None:
        state.tell("left" if number == announced and state.first else "warned")
        after = before[number]
        if callable(after):
            after(number, frame)

    for number in before:
        signal.signal(number, tell)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Driver:
    """The driver, as a place sees it."""

    def __init__(self, folder: Path, alone: float) -> None:
        self._file, self._alone = folder / mailbox.OWNER, alone
        self._beat: int | None = None
        self._heard = time.monotonic()

    def wants(self) -> bool:
        """Whether the driver lives. A driver that has ended has removed its folder."""
        told = mailbox.read(self._file)
        if told is None:
            return self._file.parent.is_dir() and time.monotonic() - self._heard < self._alone
        if told["beat"] != self._beat:
            self._beat, self._heard = told["beat"], time.monotonic()
        return time.monotonic() - self._heard < self._alone


class _State:
    """What the place does. A thread writes it down, at once after a change and every `PULSE` seconds.

    Attributes:
        first: Whether the place is the first of its job, for which submitit acts on signals.
    """

    def __init__(self, box: Mailbox) -> None:
        self._box = box
        self.first = box.name.endswith("-0")
        before = mailbox.read(box.state) or {}
        self._content: dict[str, Any] = {
            "life": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "beat": 0,
            "end": None,
            # The driver may not have read yet that the job's earlier process was told to go.
            "before": before.get("life") if before.get("end") else None,
            "done": 0,
            "step": 0,
            "device": None,
        }
        # A handler of a signal may run while the main thread is in `tell` for another signal.
        self._lock, self._changed, self._over = threading.RLock(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, name="state", daemon=True)

    def __enter__(self) -> "_State":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._changed.set()
        self._thread.join(mailbox.PULSE)

    def tell(self, end: str) -> None:
        """Writes at once that the place will end soon."""
        self._content["end"] = end
        self._write()

    def work(self, worker: Worker, driver: _Driver) -> bool:
        """Executes the stack of the order, if there is an order that is new and for this process.

        Raises:
            SystemExit: The driver is gone.
        """
        order = mailbox.read(self._box.order)
        if order is None or order["life"] != self._content["life"] or order["number"] <= self._content["done"]:
            return False
        self._content["step"] = 0

        def watch(step: int) -> None:
            self._content |= {"step": step, "device": worker.device}
            if not driver.wants():
                raise SystemExit

        try:
            records = worker.execute(stack_from_json(order["stack"]), watch)
            result: dict[str, Any] = {"records": [record_to_json(record) for record in records]}
        except Lost as lost:
            result = {"lost": str(lost), "of": lost.of}
        mailbox.write(self._box.result(order["number"]), {**result, "device": worker.device})
        self._content["done"] = order["number"]
        self._changed.set()
        return True

    def _run(self) -> None:
        """Writes the state, in a thread."""
        while True:
            self._content["beat"] += 1
            self._write()
            if self._over:
                return
            self._changed.wait(mailbox.PULSE)
            self._changed.clear()

    def _write(self) -> None:
        # Where the folder is gone, the driver has ended; where a disk is full, the next write tells the same.
        with self._lock, contextlib.suppress(OSError):
            mailbox.write(self._box.state, self._content)
