"""Records of a study and its trials, as drivers write them."""

from typing import Any

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord

ARMS = [
    ArmRecord("base", True, {}, {"rule": "comba"}),
    ArmRecord("no_d", False, {"rule.d": [0.02, 0]}, {"rule": "comba", "d": 0}),
]


def run(seed: int = 0, **given: Any) -> RunRecord:
    return RunRecord(**{"seed": seed, "metrics": [("test", "accuracy", 10, 0.5)], **given})


def trial(key: str = "k", **given: Any) -> TrialRecord:
    record: dict[str, Any] = {
        "key": key,
        "task": "mqar",
        "task_version": 1,
        "stage": "confirm",
        "config": {"train": {"lr": 0.01}},
        "state": "done",
        "started_at": 1000.0,
        "finished_at": 1060.5,
        "seconds": 60.5,
        "rule": RuleRecord("comba", "abc", "class Comba: ..."),
        "runs": [run()],
    }
    return TrialRecord(**{**record, **given})


def begin(store: Store, name: str = "study", identity: str | None = None, **given: Any) -> int:
    study: dict[str, Any] = {
        "profile": None,
        "spec": {"name": name},
        "arms": ARMS,
        "provenance": {"git": "1"},
    }
    return store.begin_study(name=name, identity=identity or name, **{**study, **given})
