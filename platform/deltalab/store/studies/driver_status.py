"""The status of the drivers of a running study: their stacks and devices, and the progress of the study.

A driver writes its status as JSON into its row with each heartbeat (`deltalab.store.drivers`). The status is only
shown to readers, and decides nothing.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Self

from sqlalchemy import select

from deltalab.store import drivers
from deltalab.store.models import Driver, Stage
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger
from deltalab.training.time_budget import reached


@dataclass(frozen=True)
class RunningStack:
    """A stack that trains now.

    Attributes:
        stage: "tune" or "confirm".
        step: The step that the training has reached.
        steps: The number of steps of the whole training.
        seconds: The time since the training began.
        device: The name of the device on which the stack trains; None until it is known.
        budget: The seconds of steps that end the training, of which `step` tells the share; None if steps alone do.
    """

    name: str
    stage: Stage
    step: int
    steps: int
    seconds: float
    device: str | None
    budget: float | None = None

    @property
    def reached(self) -> str:
        """How far the training is, in steps or in seconds."""
        return reached(self.step, self.steps, self.budget)


@dataclass(frozen=True)
class Device:
    """A GPU, or the CPUs of a machine.

    Attributes:
        stacks: The number of stacks that train on the device now.
        busy: The share of time in which at least one stack trained on the device.
    """

    name: str
    stacks: int
    busy: float


@dataclass(frozen=True)
class DriverStatus:
    """The status of one driver.

    Attributes:
        seconds: The time since the driver began.
        places: The number of stacks that the driver can run at a time.
        busy: The share of places that were in use: the seconds of all stacks, divided by `places` times `seconds`.
        stacks: The stacks that train now.
        devices: The devices on which a stack has trained.
        stages: stage -> (trials that have ended, trials in all); empty if another driver holds the study.
        eta: The seconds until the study ends; None while nothing is measured.
    """

    seconds: float
    places: int
    busy: float
    stacks: tuple[RunningStack, ...]
    devices: tuple[Device, ...]
    stages: dict[Stage, tuple[int, int]]
    eta: float | None

    def to_json(self) -> dict[str, Any]:
        """Returns the status as a dictionary that can be written as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Returns the status from a dictionary that `to_json` made."""
        return cls(
            **{
                **values,
                "stacks": tuple(RunningStack(**stack) for stack in values["stacks"]),
                "devices": tuple(Device(**device) for device in values["devices"]),
                "stages": {stage: tuple(counts) for stage, counts in values["stages"].items()},
            }
        )


@dataclass(frozen=True)
class StudyProgress:
    """The progress of a running study.

    Attributes:
        stages: stage -> (trials that have ended, trials in all), as the holder of the study reports.
        eta: The seconds until the study ends, as the holder of the study reports; None while nothing is measured.
        drivers: The status of each driver that lives, the holder first.
    """

    stages: dict[Stage, tuple[int, int]]
    eta: float | None
    drivers: tuple[DriverStatus, ...]

    @property
    def completed(self) -> int:
        """The number of trials that have ended."""
        return sum(ended for ended, _ in self.stages.values())

    @property
    def total(self) -> int:
        """The number of trials in all."""
        return sum(total for _, total in self.stages.values())

    @property
    def line(self) -> str:
        """The progress in one line.

        Examples:
            >>> StudyProgress({"tune": (8, 8), "confirm": (4, 32)}, 170.0, ()).line
            '12 of 40 trials, ETA 3 min'
        """
        if not self.stages:
            return "starting"
        return f"{self.completed} of {self.total} trials, ETA {duration(self.eta)}"


@waited
def study_progress(ledger: Ledger, study_ids: Iterable[int]) -> dict[int, StudyProgress]:
    """Returns the progress of studies: id of the study -> progress. Studies without a living holder are left out."""
    rows = select(Driver).where(Driver.study_id.in_(list(study_ids))).order_by(Driver.holds.desc(), Driver.id)
    with ledger._reading() as session:
        living = drivers.living(session, session.scalars(rows))
    drivers_of: dict[int, list[Driver]] = {}
    for driver in living:
        if driver.holds or driver.study_id in drivers_of:
            drivers_of.setdefault(driver.study_id, []).append(driver)
    return {study_id: _of(rows) for study_id, rows in drivers_of.items()}


def _of(rows: list[Driver]) -> StudyProgress:
    """Returns the progress of a study from the rows of its drivers."""
    statuses = tuple(DriverStatus.from_json(row.progress) for row in rows if row.progress)
    holder = DriverStatus.from_json(rows[0].progress) if rows[0].progress else None
    return StudyProgress(holder.stages if holder else {}, holder.eta if holder else None, statuses)


def duration(seconds: float | None) -> str:
    """Returns a time as text, rounded as suits an estimate.

    Examples:
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
