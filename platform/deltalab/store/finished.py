"""Reads trials that have ended as wholes: with their runs and every point of their curves."""

from dataclasses import dataclass

from sqlalchemy import func, select

from deltalab.store.models import Arm, ArmTrial, Metric, Run, RunState, Trial, TrialState
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

Curves = dict[str, list[tuple[int, float]]]
"""SPLIT/METRIC -> (step, value), by rising steps."""


@dataclass(frozen=True)
class Ended:
    """A trial that has ended, in one arm; an arm that has it under several numbers has the least.

    runs: by seed, their state, the step at which one diverged, and the curves.
    """

    arm: str
    number: int
    values: dict[str, object]
    trial: Trial
    runs: dict[int, tuple[RunState, int | None, Curves]]


@waited
def ended(ledger: Ledger, study_id: int) -> dict[tuple[str, str], tuple[TrialState, list[int]]]:
    """By arm and key, the state of each trial of a study that has ended, and its seeds. Without infeasible ones."""
    rows = (
        select(Arm.name, Trial.key, Trial.state, Run.seed)
        .join_from(Arm, ArmTrial)
        .join(Trial)
        .outerjoin(Run)
        .where(Arm.study_id == study_id, Trial.state != "infeasible")
        .order_by(Trial.id, Run.seed)
        .distinct()
    )
    found: dict[tuple[str, str], tuple[TrialState, list[int]]] = {}
    with ledger._reading() as session:
        for arm, key, state, seed in session.execute(rows):
            found.setdefault((arm, key), (state, []))[1].extend([] if seed is None else [seed])
    return found


@waited
def count(ledger: Ledger, study_id: int) -> int:
    """How many trials a study's arms have: whether there is something new to read."""
    rows = select(func.count()).select_from(ArmTrial).join(Arm).where(Arm.study_id == study_id)
    with ledger._reading() as session:
        return int(session.scalar(rows) or 0)


@waited
def whole(ledger: Ledger, study_id: int, arm: str, key: str) -> Ended | None:
    """A trial of an arm with all its runs; None where it was forgotten meanwhile."""
    place = (
        select(ArmTrial.number, ArmTrial.values, Trial)
        .join_from(Arm, ArmTrial)
        .join(Trial)
        .where(Arm.study_id == study_id, Arm.name == arm, Trial.key == key)
        .order_by(ArmTrial.number)
    )
    with ledger._reading() as session:
        found = session.execute(place).first()
        if found is None:
            return None
        number, values, trial = found
        runs: dict[int, tuple[RunState, int | None, Curves]] = {}
        for run in session.scalars(select(Run).where(Run.trial_id == trial.id).order_by(Run.seed)):
            curves: Curves = {}
            points = select(Metric.split, Metric.name, Metric.step, Metric.value).where(Metric.run_id == run.id)
            for split, name, step, value in session.execute(points.order_by(Metric.split, Metric.name, Metric.step)):
                curves.setdefault(f"{split}/{name}", []).append((step, value))
            runs[run.seed] = run.state, run.diverged_at, curves
        return Ended(arm, number, values, trial, runs)
