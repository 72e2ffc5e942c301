"""Runs one trial where it is: in this process, or in a Ray worker that knows nothing but the job."""

import hashlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from deltalab.errors import InputError
from deltalab.model import ModelSpec
from deltalab.registry import add_plugin, get_task, rule_plugin, task_plugin
from deltalab.store import ArtifactRecord, RuleRecord, RunRecord, TrialRecord
from deltalab.study.plan import Job
from deltalab.train import RunResult, TrainSpec, TrialResult, train


class Deadline(RuntimeError):
    """A trial took longer than the study allows."""


def execute(
    job: Job, runs: Path, *, threads: int = 1, watch: Callable[[int, list[RunResult]], None] | None = None
) -> TrialRecord:
    """Trains a job and says how it went; an exception becomes a failed trial with its traceback.

    runs: the folder of weights and checkpoints. watch: called at every evaluation.
    """
    started = time.time()
    try:
        result = _train(job, runs, threads, watch, deadline=None if job.deadline is None else started + job.deadline)
        return _record(job, started, result=result, runs=_with_weights(job, result, runs))
    except Exception:
        return _record(job, started, error=traceback.format_exc())


def failed(job: Job, error: str) -> TrialRecord:
    """The record of a trial whose worker died."""
    return _record(job, time.time(), error=error)


def _train(
    job: Job,
    runs: Path,
    threads: int,
    watch: Callable[[int, list[RunResult]], None] | None,
    deadline: float | None,
) -> TrialResult:
    torch.set_num_threads(threads)
    if 0 < job.gpu < 1:
        torch.cuda.set_per_process_memory_fraction(job.gpu)
    _load_plugins(job)
    task = get_task(job.task_kind, **job.task_params)
    model = ModelSpec.of({**job.config["model"], "rule": job.config["rule"]})
    spec = TrainSpec(**job.config["train"])

    def watched(step: int, so_far: list[RunResult]) -> None:
        if deadline is not None and time.time() > deadline:
            raise Deadline(
                f"the trial is not done after its deadline of {job.deadline:g} s, at step {step} of {spec.steps}"
            )
        if watch is not None:
            watch(step, so_far)

    checkpoint = runs / "checkpoints" / f"{job.key}.pt"
    return train(task, model, spec, job.seeds, test=job.stage == "confirm", checkpoint=checkpoint, watch=watched)


def _load_plugins(job: Job) -> None:
    """Finds the code that the study was planned with, and refuses any other."""
    for kind, name, file, digest in job.plugins:
        find = rule_plugin if kind == "rule" else task_plugin
        try:
            plugin = find(name)
        except InputError:
            add_plugin(file)
            plugin = find(name)
        if digest and plugin.hash != digest:
            raise InputError(f"{kind} '{name}' in {plugin.file} is not what the study was planned with")


def _with_weights(job: Job, result: TrialResult, runs: Path) -> list[RunRecord]:
    """The runs; those of a confirmation with their weights on disk, whole or not at all."""
    records = []
    for run in result.runs:
        artifacts = []
        if job.stage == "confirm" and run.diverged_at is None:
            file = runs / "weights" / job.key / f"seed_{run.seed}.pt"
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            torch.save(run.weights, partial)
            partial.replace(file)
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            artifacts.append(ArtifactRecord("weights", str(file), digest, file.stat().st_size))
        state = "done" if run.diverged_at is None else "diverged"
        records.append(RunRecord(run.seed, state, run.diverged_at, run.metrics, artifacts))  # type: ignore[arg-type]
    return records


def _record(
    job: Job,
    started: float,
    *,
    result: TrialResult | None = None,
    runs: list[RunRecord] | None = None,
    error: str | None = None,
) -> TrialRecord:
    finished = time.time()
    rule = job.config["rule"]["name"]
    digest = next(digest for kind, name, _, digest in job.plugins if (kind, name) == ("rule", rule))
    return TrialRecord(
        key=job.key,
        task=job.task,
        task_version=job.task_version,
        stage=job.stage,
        config=job.config,
        state="done" if error is None else "failed",
        error=error,
        started_at=started,
        finished_at=finished,
        seconds=finished - started,
        parameters=result.parameters if result else None,
        state_size=result.state_size if result else None,
        tokens_per_second=result.tokens_per_second if result else None,
        hardware=result.hardware if result else {},
        rule=RuleRecord(rule, digest, job.rule_source),
        runs=runs or [],
    )


def to_json(record: TrialRecord) -> str:
    """A record as text, to cross from a worker to the driver."""
    return json.dumps(asdict(record))


def from_json(text: str) -> TrialRecord:
    """The record that `to_json` wrote."""
    given: dict[str, Any] = json.loads(text)
    runs = [
        RunRecord(
            **{
                **run,
                "metrics": [tuple(metric) for metric in run["metrics"]],
                "artifacts": [ArtifactRecord(**artifact) for artifact in run["artifacts"]],
            }
        )
        for run in given["runs"]
    ]
    return TrialRecord(**{**given, "rule": RuleRecord(**given["rule"]), "runs": runs})
