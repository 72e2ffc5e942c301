"""The ledger, which is a database of studies. No other package contains SQL."""

from deltalab.store.drivers import Busy, Heartbeat, TakenOver
from deltalab.store.held_file import LedgerGone
from deltalab.store.ledger import Store
from deltalab.store.models import Arm, ArmTrial, Artifact, Metric, RuleVersion, Run, Study, Trial
from deltalab.store.records import (
    ArmRecord,
    ArtifactRecord,
    CurvePoint,
    FinalMetric,
    RuleRecord,
    RunRecord,
    TrialRecord,
    TrialRow,
    TrialSummary,
)

__all__ = [
    "Arm",
    "ArmRecord",
    "ArmTrial",
    "Artifact",
    "ArtifactRecord",
    "Busy",
    "CurvePoint",
    "FinalMetric",
    "Heartbeat",
    "LedgerGone",
    "Metric",
    "RuleRecord",
    "RuleVersion",
    "Run",
    "RunRecord",
    "Store",
    "Study",
    "TakenOver",
    "Trial",
    "TrialRecord",
    "TrialRow",
    "TrialSummary",
]
