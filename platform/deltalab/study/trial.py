"""Runs a stack of trials in this process, which may be a Ray worker that knows nothing but the jobs."""

import hashlib
import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from deltalab.errors import InputError
from deltalab.registry import add_plugin, get_task, rule_plugin, task_plugin
from deltalab.store import ArtifactRecord, RuleRecord, RunRecord, TrialRecord
from deltalab.study.decode_time import decode_us
from deltalab.study.plan import Job
from deltalab.training.device import keep_freed_memory
from deltalab.training.train import RunResult, TrialResult, train_together


class Deadline(RuntimeError):
    """A trial took longer than the study allows."""


def execute(
    stack: Sequence[Job], runs: Path, *, threads: int = 1, watch: Callable[[int], None] | None = None
) -> list[TrialRecord]:
    """Trains jobs as one and returns a record of each; an exception becomes a failed trial with its traceback.

    Where a stack raises, each of its jobs is trained again alone, so that only the faulty ones fail.
    runs: the folder of weights and checkpoints. watch: called at every evaluation with the step.
    """
    started = time.time()
    try:
        results = _train(stack, runs, threads, watch, started)
    except Exception as error:
        # Retrying singly cannot help: each needs the same memory, and each had the time that it would have alone.
        if len(stack) == 1 or isinstance(error, Deadline | torch.OutOfMemoryError):
            return [_record(job, started, len(stack), error=traceback.format_exc()) for job in stack]
    else:
        return [_finished(job, started, len(stack), result, runs) for job, result in zip(stack, results, strict=True)]
    return [record for job in stack for record in execute([job], runs, threads=threads, watch=watch)]


def failed(job: Job, error: str) -> TrialRecord:
    """The record of a trial whose worker died."""
    return _record(job, time.time(), 1, error=error)


def infeasible(job: Job, reason: str) -> TrialRecord:
    """The record of a candidate that makes no model, so that nothing ran."""
    return replace(_record(job, time.time(), 1, error=reason), state="infeasible", seconds=0.0)


def cut_off(runs: Path) -> list[tuple[str, ...]]:
    """Stacks of several jobs whose training left a checkpoint and no result, as the keys of their jobs."""
    listed = sorted((runs / "checkpoints").glob("*.json"))
    return [tuple(json.loads(file.read_text())) for file in listed if file.with_suffix(".pt").exists()]


def _train(
    stack: Sequence[Job], runs: Path, threads: int, watch: Callable[[int], None] | None, started: float
) -> list[TrialResult]:
    torch.set_num_threads(threads)
    keep_freed_memory()
    first = stack[0]
    for job in stack:
        _load_plugins(job)
    if first.gpu and first.specs[1].device != "cpu":
        if not torch.cuda.is_available():
            raise InputError("resources.gpu: the worker was given a GPU that torch cannot use")
        if first.gpu < 1:
            torch.cuda.set_per_process_memory_fraction(first.gpu)
    seen = 0

    def watched(member: int, step: int, so_far: list[RunResult]) -> None:
        nonlocal seen
        # A stack has the deadlines of all its trials together.
        if first.deadline is not None and time.time() - started > first.deadline * len(stack):
            raise Deadline(
                f"the trial is not done after its deadline of {first.deadline:g} s, "
                f"at step {step} of {first.specs[1].steps}"
            )
        if watch is not None and step > seen:
            watch(step)
        seen = max(seen, step)

    task = get_task(first.task_kind, **first.task_params)
    with _checkpoint(stack, runs / "checkpoints") as checkpoint:
        results = train_together(
            task,
            [job.specs for job in stack],
            first.seeds,
            test=first.stage == "confirm",
            checkpoint=checkpoint,
            watch=watched,
        )
    if first.decode:
        # One time for the stack: its trials differ only in numbers.
        cost = "cost", "decode_us", first.specs[1].steps, decode_us(*first.specs, task.length)
        for result in results:
            for run in result.runs:
                run.metrics.append(cost)
    return results


@contextmanager
def _checkpoint(stack: Sequence[Job], folder: Path) -> Iterator[Path]:
    """The file for a stack's checkpoint. For several jobs, a list of their keys lies beside it until the stack ends."""
    keys = [job.key for job in stack]
    if len(keys) == 1:
        yield folder / f"{keys[0]}.pt"
        return
    file = folder / f"{hashlib.sha256(''.join(keys).encode()).hexdigest()}.pt"
    listed = file.with_suffix(".json")
    folder.mkdir(parents=True, exist_ok=True)
    listed.write_text(json.dumps(keys))
    try:
        yield file
    except Deadline:
        raise
    except Exception:
        listed.unlink()
        file.unlink(missing_ok=True)
        raise
    listed.unlink()


def _load_plugins(job: Job) -> None:
    """Loads the plugins of a job. Raises `InputError` where one is not what the study was planned with."""
    for kind, name, file, digest in job.plugins:
        find = rule_plugin if kind == "rule" else task_plugin
        try:
            plugin = find(name)
        except InputError:
            add_plugin(file)
            plugin = find(name)
        if digest and plugin.hash != digest:
            raise InputError(f"{kind} '{name}' in {plugin.file} is not what the study was planned with")


def _finished(job: Job, started: float, sharing: int, result: TrialResult, runs: Path) -> TrialRecord:
    try:
        return _record(job, started, sharing, result=result, runs=_with_weights(job, result, runs))
    except Exception:
        return _record(job, started, sharing, error=traceback.format_exc())


def _with_weights(job: Job, result: TrialResult, runs: Path) -> list[RunRecord]:
    """The records of the runs. Those of a confirmation get their weights on disk, whole or not at all."""
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
    sharing: int,
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
        seconds=(finished - started) / sharing,
        parameters=result.parameters if result else None,
        state_size=result.state_size if result else None,
        tokens_per_second=result.tokens_per_second if result else None,
        hardware=result.hardware if result else {},
        rule=RuleRecord(rule, digest, job.rule_source),
        runs=runs or [],
    )


def to_json(record: TrialRecord) -> str:
    """A record as text, to be sent from a worker to the driver."""
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
