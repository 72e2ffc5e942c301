"""Studies of a few trials, and records of trials whose scores a test gives."""

import math
import random
from collections.abc import Callable
from typing import Any

from deltalab.store import RuleRecord, RunRecord, TrialRecord
from deltalab.study.workers.jobs import Job

MQAR = {"length": 16, "pairs": 2, "vocab_size": 32}


STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": MQAR},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 1},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 2},
    },
    "seeds": 2,
    "resources": {"stack": 1},
}


LR = {"log_uniform": [1e-3, 1e-1]}


Score = Callable[[Job, int], float | None]


def record(job: Job, score: Score, metric: str = "accuracy", flops: float = 1000.0, size: float = 1.0) -> TrialRecord:
    """The record of a trial with a score for each seed. A run with NaN diverged; a trial with None raised."""
    cost = [("cost", "flops_per_token", 6, flops), ("cost", "state_size", 6, size)]
    values = {seed: score(job, seed) for seed in job.seeds}
    failed = None in values.values()
    runs = []
    for seed, value in values.items():
        if value is not None and not math.isnan(value):
            metrics = [(split, metric, step, value) for split in ("validation", "test") for step in (3, 6)]
            runs.append(RunRecord(seed, metrics=[*metrics, *cost]))  # type: ignore[list-item]
        else:
            runs.append(RunRecord(seed, "diverged", 3))
    return TrialRecord(
        key=job.key,
        task=job.task,
        task_version=job.task_version,
        stage=job.stage,
        config=job.config,
        state="failed" if failed else "done",
        started_at=0,
        finished_at=1,
        seconds=1,
        rule=RuleRecord(job.config["rule"]["name"], "hash", "source"),
        error="boom" if failed else None,
        runs=[] if failed else runs,
    )


LOOKS = {"at_least": 8, "at_most": 12}  # 8, 9, 10, 12


ARMS = {"better": {"rule": {"d": 0}}, "same": {"rule": {"b": 1}}, "close": {"model": {"conv": 0}}}


def figures(job: Job, seed: int) -> float:
    """A score: `better` is decided at the first look, `same` has no prospect, `close` needs all seeds."""
    noise = random.Random(seed).uniform(-0.02, 0.02)
    of_arm = random.Random(f"{job.arm} {seed}").uniform(-0.02, 0.02)
    shift = {"base": 0.0, "better": 0.2, "same": 0.0, "close": 0.011}[job.arm]
    return 0.5 + noise + shift + (of_arm if job.arm in ("same", "close") else of_arm / 10) - 0.01 * job.number


SEARCH = {
    "rule": {"choice": ["comba", "deltanet", {"name": "comba", "d": 0}]},
    "model.heads": {"choice": [1, 2, 4]},
    "train.lr": LR,
    "trials": 13,
    "finalists": 3,
}
