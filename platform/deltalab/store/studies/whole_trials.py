"""Reads whole trials: each ended trial with its runs and every point of their curves."""

from dataclasses import dataclass

from sqlalchemy import func, select

from deltalab.store.models import Arm, ArmTrial, Metric, Run, RunState, Trial, TrialState
from deltalab.store.outage import waited
from deltalab.store.queries import Ledger

Curves = dict[str, list[tuple[int, float]]]
"""SPLIT/METRIC -> points (step, value), sorted by step."""


@dataclass(frozen=True)
class WholeTrial:
    """A trial that has ended, in one arm.

    Attributes:
        number: The trial's number in the arm; if it has several numbers, the smallest.
        values: The values that tuning or a search gave the trial.
        trial: The row of the trial.
        runs: seed -> (state, step at which the run diverged or None, curves).
    """

    arm: str
    number: int
    values: dict[str, object]
    trial: Trial
    runs: dict[int, tuple[RunState, int | None, Curves]]


@waited
def ended_trials(ledger: Ledger, study_id: int) -> dict[tuple[str, str], tuple[TrialState, list[int]]]:
    """Returns the ended trials of a study: (arm, key) -> (state, seeds). Infeasible trials are left out."""
    rows = (
        select(Arm.name, Trial.key, Trial.state, Run.seed)
        .join_from(Arm, ArmTrial)
        .join(Trial)
        .outerjoin(Run)
        .where(Arm.study_id == study_id, Trial.state != "infeasible")
        .order_by(Trial.id, Run.seed)
        .distinct()
    )
    trials: dict[tuple[str, str], tuple[TrialState, list[int]]] = {}
    with ledger._reading() as session:
        for arm, key, state, seed in session.execute(rows):
            trials.setdefault((arm, key), (state, []))[1].extend([] if seed is None else [seed])
    return trials


@waited
def trial_count(ledger: Ledger, study_id: int) -> int:
    """Returns how many trials a study's arms have. If the number has changed, there are new trials to read."""
    rows = select(func.count()).select_from(ArmTrial).join(Arm).where(Arm.study_id == study_id)
    with ledger._reading() as session:
        return int(session.scalar(rows) or 0)


@waited
def whole_trial(ledger: Ledger, study_id: int, arm: str, key: str) -> WholeTrial | None:
    """Returns a trial of an arm with all its runs, or None if the trial was forgotten meanwhile."""
    rows = (
        select(ArmTrial.number, ArmTrial.values, Trial)
        .join_from(Arm, ArmTrial)
        .join(Trial)
        .where(Arm.study_id == study_id, Arm.name == arm, Trial.key == key)
        .order_by(ArmTrial.number)
    )
    with ledger._reading() as session:
        row = session.execute(rows).first()
        if row is None:
            return None
        number, values, trial = row
        runs: dict[int, tuple[RunState, int | None, Curves]] = {}
        for run in session.scalars(select(Run).where(Run.trial_id == trial.id).order_by(Run.seed)):
            curves: Curves = {}
            points = select(Metric.split, Metric.name, Metric.step, Metric.value).where(Metric.run_id == run.id)
            for split, name, step, value in session.execute(points.order_by(Metric.split, Metric.name, Metric.step)):
                curves.setdefault(f"{split}/{name}", []).append((step, value))
            runs[run.seed] = run.state, run.diverged_at, curves
        return WholeTrial(arm, number, values, trial, runs)
