"""Accounts for a driver's stacks: which run, on which devices, how busy those are, and when the study will end.

The executor's thread tells of stacks and counts; the heartbeat and the terminal read from threads of their own. No
method waits for the database or the schedule, so that a heartbeat is never late because of them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from deltalab.store.models import Stage
from deltalab.store.progress import Device, Doing, RunningStack
from deltalab.study.workers.jobs import Job

TELLS = 0.1
"""The share of its steps from which a running stack tells how long the others take."""


class Count(NamedTuple):
    """Trials of a stage: those that have ended, and all. left: seeds times steps of those that have not ended."""

    ended: int
    total: int
    left: float


class Pace(NamedTuple):
    """Seconds that a place took for so much work, without the start of its process."""

    seconds: float = 0.0
    work: float = 0.0

    def plus(self, seconds: float, work: float) -> "Pace":
        return Pace(self.seconds + seconds, self.work + work)


def work(stack: Sequence[Job]) -> float:
    """Seeds times steps of a stack's trials."""
    return float(sum(len(job.seeds) * job.config["train"]["steps"] for job in stack))


@dataclass
class _Running:
    """first: when it was first seen to train, and with which share of its steps done; before, processes start."""

    stack: Sequence[Job]
    name: str
    began: float
    here: bool
    step: int = 0
    first: tuple[float, float] | None = None
    device: str | None = None

    @property
    def steps(self) -> int:
        return int(self.stack[0].config["train"]["steps"])

    @property
    def share(self) -> float:
        return min(1.0, self.step / self.steps)

    def told(self, now: float) -> tuple[float, float] | None:
        """Seconds, and the share of its steps that it did in them; None where it is too early to tell."""
        if self.first is None or self.share - self.first[1] < TELLS:
            return None
        return now - self.first[0], self.share - self.first[1]


@dataclass
class _Used:
    """A device. since: when its present run of stacks began. idle_from: when the run before that ended."""

    stacks: int = 0
    busy: float = 0.0
    since: float = 0.0
    idle_from: float = 0.0


class Account:
    """places: stacks that this driver can run at a time. elsewhere: those of the drivers that have joined it."""

    def __init__(self) -> None:
        self.places, self.elsewhere = 1, 0
        self._lock = Lock()
        self._began = time.monotonic()
        self._stages: dict[Stage, Count] = {}
        self._running: dict[str, _Running] = {}
        self._devices: dict[str, _Used] = {}
        self._busy = 0.0
        self._pace = Pace()

    def counted(self, stages: Mapping[Stage, Count], pace: Pace) -> None:
        """pace: of the trials that have ended."""
        with self._lock:
            self._stages, self._pace = dict(stages), pace

    @property
    def stages(self) -> dict[Stage, Count]:
        with self._lock:
            return dict(self._stages)

    @property
    def total(self) -> int | None:
        """Trials of the whole study; None while they are not counted."""
        return sum(count.total for count in self.stages.values()) or None

    def started(self, stack: Sequence[Job], name: str, *, here: bool) -> None:
        """A stack begins. here: whether this driver trains it, and not one that has joined."""
        with self._lock:
            self._running[stack[0].key] = _Running(stack, name, time.monotonic(), here)

    def advanced(self, stack: Sequence[Job], step: int, device: str | None = None) -> None:
        """A stack has reached a step. device: what it trains on, once that is known."""
        with self._lock:
            running = self._running[stack[0].key]
            running.step = step
            if running.first is None and step:
                running.first = time.monotonic(), running.share
            self._on(running, device)

    def ended(self, stack: Sequence[Job], device: str | None = None) -> None:
        """A stack has ended, with results or without."""
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
        if device is None or running.device is not None or not running.here:
            return
        running.device, used = device, self._devices.setdefault(device, _Used())
        if not used.stacks:
            used.since = max(running.began, used.idle_from)
        used.stacks += 1

    def eta(self) -> float | None:
        """Seconds until the study ends, at the speed of the stacks so far; None while none has told its speed."""
        with self._lock:
            return self._eta(time.monotonic())

    def _eta(self, now: float) -> float | None:
        left = sum(count.left for count in self._stages.values())
        if not left and not self._running:
            return 0.0 if self._stages else None
        running = list(self._running.values())
        told = [one.told(now) for one in running]
        pace = self._pace
        for one, part in zip(running, told, strict=True):
            if part is not None:
                pace = pace.plus(part[0], work(one.stack) * part[1])
        if not pace.work:
            return None
        each = pace.seconds / pace.work
        rests = [
            work(one.stack) * (1 - one.share) * each if part is None else (1 - one.share) * part[0] / part[1]
            for one, part in zip(running, told, strict=True)
        ]
        waiting = max(0.0, left - sum(work(one.stack) for one in running))
        places = max(1, self.places + self.elsewhere, len(rests))
        return max([(waiting * each + sum(rests)) / places, *rests])

    def doing(self) -> Doing:
        with self._lock:
            now = time.monotonic()
            seconds = max(1e-3, now - self._began)
            own = [running for running in self._running.values() if running.here]
            busy = self._busy + sum(now - running.began for running in own)
            return Doing(
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
                    )
                    for running in own
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
