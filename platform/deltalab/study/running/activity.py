"""Tracks what a driver does now: which stacks run, on which devices, how busy the devices are, and when the study ends.

The thread of the executor reports stacks and trial counts. The threads of the heartbeat and of the terminal read them.
No method waits for the database or the schedule, either of which could make a heartbeat late.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from deltalab.store.models import Stage
from deltalab.store.studies.driver_status import Device, DriverStatus, RunningStack
from deltalab.study.workers.jobs import Job

TELLS = 0.1
"""The share of a stack's steps that must be timed before the rest of the stack is predicted from them."""


class Count(NamedTuple):
    """How many trials a stage has, and how much work is left.

    Attributes:
        ended: How many trials have ended.
        total: How many trials there are in all.
        left: The work of the trials that have not ended, as seeds times steps.
    """

    ended: int
    total: int
    left: float


class Pace(NamedTuple):
    """How long a place takes for its work.

    Attributes:
        seconds: Seconds that the work took, without the start of the process.
        work: The work, as seeds times steps.
    """

    seconds: float = 0.0
    work: float = 0.0

    def plus(self, seconds: float, work: float) -> "Pace":
        """Returns the pace of this work and of further work together."""
        return Pace(self.seconds + seconds, self.work + work)


def work(stack: Sequence[Job]) -> float:
    """Counts seeds times steps of a stack's trials."""
    return float(sum(len(job.seeds) * job.config["train"]["steps"] for job in stack))


@dataclass
class _Running:
    """A stack that runs."""

    stack: Sequence[Job]
    name: str
    began: float
    here: bool
    step: int = 0
    first: tuple[float, float] | None = None
    """When the stack was first seen to train, and the share of its steps done by then; processes start before."""
    device: str | None = None

    @property
    def steps(self) -> int:
        return int(self.stack[0].config["train"]["steps"])

    @property
    def budget(self) -> float | None:
        seconds: float | None = self.stack[0].config["train"].get("seconds")
        return seconds

    @property
    def share(self) -> float:
        return min(1.0, self.step / self.steps)

    def told(self, now: float) -> tuple[float, float] | None:
        """Returns seconds, and the share of all steps done in these seconds; None if it is too early to tell."""
        if self.first is None or self.share - self.first[1] < TELLS:
            return None
        return now - self.first[0], self.share - self.first[1]


@dataclass
class _Used:
    """How a device is used."""

    stacks: int = 0
    busy: float = 0.0
    since: float = 0.0
    """When the device began to be busy without a break."""
    idle_from: float = 0.0
    """When the device last stopped being busy before `since`."""


class DriverActivity:
    """Tracks the stacks of a driver, the driver's devices, and the trials of the study.

    Attributes:
        places: How many stacks this driver can run at a time.
        elsewhere: How many stacks the drivers that have joined the study can run at a time, all together.
    """

    def __init__(self) -> None:
        """Begins now, without a stack."""
        self.places, self.elsewhere = 1, 0
        self._lock = Lock()
        self._began = time.monotonic()
        self._stages: dict[Stage, Count] = {}
        self._running: dict[str, _Running] = {}
        self._devices: dict[str, _Used] = {}
        self._busy = 0.0
        self._pace = Pace()

    def counted(self, stages: Mapping[Stage, Count], pace: Pace) -> None:
        """Notes the trials of each stage, and the pace of the trials that have ended."""
        with self._lock:
            self._stages, self._pace = dict(stages), pace

    @property
    def stages(self) -> dict[Stage, Count]:
        """The trials of each stage."""
        with self._lock:
            return dict(self._stages)

    @property
    def total(self) -> int | None:
        """How many trials the whole study has; None while they are not counted."""
        return sum(count.total for count in self.stages.values()) or None

    def started(self, stack: Sequence[Job], name: str, *, here: bool) -> None:
        """Notes that a stack begins.

        Args:
            stack: The stack.
            name: What people call the stack.
            here: True if this driver trains the stack, False if a joined driver does.
        """
        with self._lock:
            self._running[stack[0].key] = _Running(stack, name, time.monotonic(), here)

    def advanced(self, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        """Notes that a stack has reached a step, and on which device the stack trains, once the device is known."""
        with self._lock:
            running = self._running[stack[0].key]
            running.step = step
            if running.first is None and step:
                running.first = time.monotonic(), running.share
            self._on(running, device)

    def ended(self, stack: Sequence[Job], device: str | None = None) -> None:
        """Notes that a stack has ended, with results or without."""
        with self._lock:
            now, running = time.monotonic(), self._running.pop(stack[0].key)
            self._on(running, device)
            if running.here:
                self._busy += now - running.began
            if running.device is not None:
                used = self._devices[running.device]
                used.stacks -= 1
                if not used.stacks:
                    used.busy, used.idle_from = used.busy + now - used.since, now

    def _on(self, running: _Running, device: str | None) -> None:
        """Notes on which device a stack of this driver trains."""
        if device is None or running.device is not None or not running.here:
            return
        running.device, used = device, self._devices.setdefault(device, _Used())
        if not used.stacks:
            used.since = max(running.began, used.idle_from)
        used.stacks += 1

    def eta(self) -> float | None:
        """Returns the seconds until the study ends, at the speed of the work so far; None while no speed is known."""
        with self._lock:
            return self._eta(time.monotonic())

    def _eta(self, now: float) -> float | None:
        """Returns what `eta` returns, at the time `now`. The caller must hold the lock."""
        left = sum(count.left for count in self._stages.values())
        if not left and not self._running:
            return 0.0 if self._stages else None
        stacks = list(self._running.values())
        told = [running.told(now) for running in stacks]
        pace = self._pace
        for running, part in zip(stacks, told, strict=True):
            if part is not None:
                pace = pace.plus(part[0], work(running.stack) * part[1])
        if not pace.work:
            return None
        seconds = pace.seconds / pace.work
        rests = [
            work(running.stack) * (1 - running.share) * seconds
            if part is None
            else (1 - running.share) * part[0] / part[1]
            for running, part in zip(stacks, told, strict=True)
        ]
        waiting = max(0.0, left - sum(work(running.stack) for running in stacks))
        places = max(1, self.places + self.elsewhere, len(rests))
        return max([(waiting * seconds + sum(rests)) / places, *rests])

    def status(self) -> DriverStatus:
        """Returns the state of this driver for the heartbeat to record."""
        with self._lock:
            now = time.monotonic()
            seconds = max(1e-3, now - self._began)
            here = [running for running in self._running.values() if running.here]
            busy = self._busy + sum(now - running.began for running in here)
            return DriverStatus(
                seconds=seconds,
                places=self.places,
                busy=min(1.0, busy / (seconds * max(1, self.places))),
                stacks=tuple(
                    RunningStack(
                        name=running.name,
                        stage=running.stack[0].stage,
                        step=running.step,
                        steps=running.steps,
                        seconds=now - running.began,
                        device=running.device,
                        budget=running.budget,
                    )
                    for running in here
                ),
                devices=tuple(
                    Device(
                        name=name,
                        stacks=used.stacks,
                        busy=min(1.0, (used.busy + (now - used.since if used.stacks else 0.0)) / seconds),
                    )
                    for name, used in self._devices.items()
                ),
                stages={stage: (count.ended, count.total) for stage, count in self._stages.items()},
                eta=self._eta(now),
            )
