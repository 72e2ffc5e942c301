"""A small study that trains, its file and plan, and what the ledger must hold after it."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from deltalab.store import RunRecord, Store, TrialRecord
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.train_stack import failed

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 2, "mlp": False, "chunk_size": 16},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 3, "eval_batches": 1},
    },
    "ablate": ["d"],
    "tune": {"trials": 2, "train.lr": {"log_uniform": [1e-3, 1e-1]}},
    "seeds": 2,
}

LEAST: dict[str, Any] = {
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "linear_attention",
        "model": {"d_model": 8, "layers": 1, "heads": 1, "mlp": False},
        "train": {"steps": 4, "batch_size": 4, "lr": 1e-2, "evaluations": 1, "eval_batches": 1},
    },
}
"""The task and the base of a study for which the trials hardly matter."""


def write(study_file: Path, **changes: Any) -> Path:
    """Writes the study, with other values of some keys."""
    study_file.write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))
    return study_file


def planned(study_file: Path) -> Plan:
    """The plan of a study's file."""
    return make_plan(load_study(study_file))


def ledger(db: Path) -> dict[str, list[tuple[Any, ...]]]:
    """All that the ledger says of trials, trial by trial, but when and where they ran."""
    with closing(sqlite3.connect(db)) as connection:
        ask: Callable[[str], list[tuple[Any, ...]]] = lambda sql: sorted(connection.execute(sql))  # noqa: E731
        of = "(trial JOIN run ON trial.id = trial_id)"
        return {
            "places": ask(
                "SELECT study.name, arm.name, task, stage, number, key, trial.state, arm_trial.[values] FROM arm_trial "
                "JOIN arm ON arm.id = arm_id JOIN trial ON trial.id = trial_id JOIN study ON study.id = study_id"
            ),
            "runs": ask(f"SELECT key, seed, run.state, diverged_at FROM {of}"),
            "metrics": ask(f"SELECT key, seed, split, name, step, value FROM metric JOIN {of} ON run.id = run_id"),
            "weights": ask(f"SELECT key, seed, kind, bytes FROM artifact JOIN {of} ON run.id = run_id"),
            "trials": ask("SELECT key FROM trial"),
        }


def assert_ledger_is_of(db: Path, plan: Plan) -> None:
    """Every trial of the plan is there once, and the study is done."""
    places = [row for row in ledger(db)["places"] if row[0] == plan.spec.name]
    assert len(places) == plan.trials
    assert len({row[1:5] for row in places}) == len(places)
    keys = [key for (key,) in ledger(db)["trials"]]
    assert len(set(keys)) == len(keys)
    with Store.open(db) as store:
        assert store.study(plan.spec.name).state == "done"


def measured(planned_job: Job) -> TrialRecord:
    """The record of a trial that did not train; its score follows from its key."""
    value = int(planned_job.key[:6], 16) / 16**6
    metrics = [(split, "accuracy", 6, value) for split in ("validation", "test")]
    record = failed(planned_job, "")
    runs_of = [RunRecord(seed, metrics=metrics) for seed in planned_job.seeds]  # type: ignore[arg-type]
    return replace(record, state="done", error=None, seconds=1.0, runs=runs_of)
