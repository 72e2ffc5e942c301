"""What the drivers of a running study do: their stacks and devices, and how far the study is.

A driver writes it into its row with each heartbeat (`deltalab.store.drivers`), as JSON. Nothing is decided by it.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from sqlalchemy import select

from deltalab.store import drivers
from deltalab.store.models import Driver, Stage
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger


@dataclass(frozen=True)
class RunningStack:
    """A stack that trains now.

    step: how far it is, of so many steps. seconds: since it began. device: None until it is known.
    """

    name: str
    stage: Stage
    step: int
    steps: int
    seconds: float
    device: str | None


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPUs of a machine. stacks: that train on it now. busy: the share of time with at least one."""

    name: str
    stacks: int
    busy: float


@dataclass(frozen=True)
class Doing:
    """What one driver does.

    seconds: since it began. places: stacks that it can run at a time. busy: the seconds of all its stacks, over places
    times seconds. devices: those on which a stack has trained.
    stages: (trials that have ended, trials in all) by stage; empty where another driver holds the study.
    eta: seconds until the study ends; None while nothing is measured.
    """

    seconds: float
    places: int
    busy: float
    stacks: tuple[RunningStack, ...]
    devices: tuple[Device, ...]
    stages: dict[Stage, tuple[int, int]]
    eta: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Self:
        return cls(
            **{
                **given,
                "stacks": tuple(RunningStack(**stack) for stack in given["stacks"]),
                "devices": tuple(Device(**device) for device in given["devices"]),
                "stages": {stage: tuple(counts) for stage, counts in given["stages"].items()},
            }
        )


@dataclass(frozen=True)
class Progress:
    """How far a running study is. drivers: what each of its processes does, its holder first.

    stages, eta: as the holder says; see `Doing`.
    """

    stages: dict[Stage, tuple[int, int]]
    eta: float | None
    drivers: tuple[Doing, ...]

    @property
    def completed(self) -> int:
        return sum(ended for ended, _ in self.stages.values())

    @property
    def total(self) -> int:
        return sum(total for _, total in self.stages.values())

    @property
    def line(self) -> str:
        """
        >>> Progress({"tune": (8, 8), "confirm": (4, 32)}, 170.0, ()).line
        '12 of 40 trials, ETA 3 min'
        """
        if not self.stages:
            return "starting"
        return f"{self.completed} of {self.total} trials, ETA {duration(self.eta)}"


@waited
def progress(ledger: Ledger, study_ids: Iterable[int]) -> dict[int, Progress]:
    """How far each of these studies is, by its id, of those that a living driver runs."""
    rows = select(Driver).where(Driver.study_id.in_(list(study_ids))).order_by(Driver.holds.desc(), Driver.id)
    with ledger._reading() as session:
        living = drivers.living(session, session.scalars(rows))
    found: dict[int, list[Driver]] = {}
    for driver in living:
        if driver.holds or driver.study_id in found:
            found.setdefault(driver.study_id, []).append(driver)
    return {study_id: _of(rows) for study_id, rows in found.items()}


def _of(rows: list[Driver]) -> Progress:
    doing = tuple(Doing.from_json(row.progress) for row in rows if row.progress)
    holder = Doing.from_json(rows[0].progress) if rows[0].progress else None
    return Progress(holder.stages if holder else {}, holder.eta if holder else None, doing)


def duration(seconds: float | None) -> str:
    """With the few digits that an estimate has.

    >>> [duration(s) for s in (0.3, 42, 300, 9000, 900000, None)]
    ['1 s', '42 s', '5 min', '2.5 h', '10.4 d', 'unknown']
    """
    if seconds is None:
        return "unknown"
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 200000 else f"{seconds / 86400:.1f} d"
