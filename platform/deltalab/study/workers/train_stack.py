"""Trains a stack of trials in this process, which is a worker's child and knows nothing but the jobs."""

import hashlib
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Self

import torch

from deltalab.errors import InputError
from deltalab.own_module import is_path
from deltalab.registry import add_module, add_plugin, get_task, rule_plugin, task_plugin
from deltalab.store import ArtifactRecord, RuleRecord, RunRecord, TrialRecord
from deltalab.study.workers.decode_time import decode_us
from deltalab.study.workers.jobs import IMPORTING, Job, Lost, checkpoint_file, forget_checkpoint, late
from deltalab.training.beat import Beat, unheard
from deltalab.training.device import device_name, device_type, keep_freed_memory
from deltalab.training.train import RunResult, TrialResult, disk, is_of_disk, save, train_together


class Deadline(RuntimeError):
    """A trial took longer than the study allows."""


class Start(NamedTuple):
    """When a stack began. The time of day is read once, so that a clock that jumps changes no duration.

    Attributes:
        of_day: Unix seconds.
        monotonic: The time of `time.monotonic`.
    """

    of_day: float
    monotonic: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.time(), time.monotonic())


def execute(
    stack: Sequence[Job],
    runs: Path,
    *,
    threads: int = 1,
    watch: Callable[[int], None] | None = None,
    on: Callable[[str], None] = lambda device: None,
    beat: Beat = unheard,
) -> list[TrialRecord]:
    """Trains jobs as one. An exception becomes a failed trial with its traceback.

    If a stack raises, each of its jobs is trained again alone, so that only the faulty jobs fail.

    Args:
        stack: The jobs.
        runs: The folder of weights and checkpoints.
        threads: The threads of the training.
        watch: Called with the step at every evaluation.
        on: Called with the name of the device.
        beat: Called at each beat, as `Beat` describes.

    Returns:
        A record of each job, in the order of the stack.

    Raises:
        Lost: Weights or checkpoints cannot be read or written, or an engine was killed.
    """
    began = Start.now()
    try:
        results = _train(stack, runs, threads, watch, on, beat)
        beat("saving weights")
        return [_finished(job, began, len(stack), result, runs) for job, result in zip(stack, results, strict=True)]
    except Lost:
        raise
    except (Exception, SystemExit) as error:
        if is_of_disk(error):
            reason = f"{traceback.format_exc()}weights and checkpoints in {runs}: {error}"
            raise Lost(reason, "infrastructure") from error
        # Alone, each job would need the same memory, and have the same time as it had.
        if len(stack) == 1 or isinstance(error, Deadline | torch.OutOfMemoryError):
            return [_record(job, began, len(stack), error=_traceback(error)) for job in stack]
    return [record for job in stack for record in execute([job], runs, threads=threads, watch=watch, on=on, beat=beat)]


def _traceback(error: BaseException) -> str:
    """The traceback of an error; for `SystemExit`, which has no message, a last line says what it is."""
    lines = "".join(traceback.format_exception(error))
    return f"{lines}the rule or the task called sys.exit({error.code!r})" if isinstance(error, SystemExit) else lines


def failed(job: Job, error: str) -> TrialRecord:
    """Makes the record of a trial whose worker died."""
    return _record(job, Start.now(), 1, error=error)


def infeasible(job: Job, reason: str) -> TrialRecord:
    """Makes the record of a candidate that makes no model, so that nothing ran."""
    return replace(_record(job, Start.now(), 1, error=reason), state="infeasible", seconds=0.0)


def _train(
    stack: Sequence[Job],
    runs: Path,
    threads: int,
    watch: Callable[[int], None] | None,
    on: Callable[[str], None],
    beat: Beat,
) -> list[TrialResult]:
    """Trains jobs as one, as `execute` describes."""
    # A stack has the deadlines of all its trials together.
    ends = math.inf if stack[0].deadline is None else time.monotonic() + stack[0].deadline * len(stack)
    torch.set_num_threads(threads)
    keep_freed_memory()
    first = stack[0]
    beat(IMPORTING, 0)
    for job in stack:
        _load_plugins(job)
    if first.gpu and first.specs[1].device != "cpu":
        if not torch.cuda.is_available():
            raise InputError("resources.gpu: the worker was given a GPU that torch cannot use")
        if first.gpu < 1:
            torch.cuda.set_per_process_memory_fraction(first.gpu)
    on(device_name(torch.device(device_type(first.specs[1].device))))
    seen, done = 0, 0

    def watched(member: int, step: int, so_far: list[RunResult]) -> None:
        nonlocal seen
        if watch is not None and step > seen:
            watch(max(step, done))  # time may have gone further than steps
        seen = max(seen, step)

    def timed(what: str, step: int | None = None, ends: float = ends) -> None:
        nonlocal done
        done = done if step is None else step
        if time.monotonic() > ends:
            raise Deadline(late(first, done))
        beat(what, step, ends)

    if first.engine is not None:
        from deltalab.study.workers.engine_training import train_by_engine

        (job,) = stack
        return [train_by_engine(job, runs, watch=watch, beat=timed)]
    timed("making the task and the model")
    task = get_task(first.task_kind, **first.task_params)
    with _checkpoint(stack, runs) as checkpoint:
        results = train_together(
            task,
            [job.specs for job in stack],
            first.seeds,
            test=first.stage == "confirm",
            checkpoint=checkpoint,
            watch=watched,
            beat=timed,
        )
    if first.decode:
        timed("timing a decoding step")
        # The trials of a stack differ only in numbers, so that all take the same time.
        cost = "cost", "decode_us", first.specs[1].steps, decode_us(*first.specs, task.length)
        for result in results:
            for run in result.runs:
                run.metrics.append(cost)
    return results


@contextmanager
def _checkpoint(stack: Sequence[Job], runs: Path) -> Iterator[Path]:
    """The file for a stack's checkpoint. A list of the keys of several jobs lies beside it until the stack ends."""
    file = checkpoint_file(stack, runs)
    if len(stack) == 1:
        yield file
        return
    listed = file.with_suffix(".json")
    with disk():
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text(json.dumps([job.key for job in stack]))
    try:
        yield file
    except (Exception, SystemExit) as error:
        if not isinstance(error, Deadline) and not is_of_disk(error):
            forget_checkpoint(stack, runs)
        raise
    listed.unlink(missing_ok=True)


def _load_plugins(job: Job) -> None:
    """Loads the plugins of a job. Raises `InputError` if a plugin is not what the study was planned with."""
    for kind, name, file, digest in job.plugins:
        find = rule_plugin if kind == "rule" else task_plugin
        try:
            plugin = find(name)
        except InputError:
            if kind == "rule" and is_path(name):
                add_module(name, file)
            else:
                add_plugin(file)
            plugin = find(name)
        if digest and plugin.hash != digest:
            raise InputError(f"{kind} '{name}' in {plugin.file} is not what the study was planned with")


def _finished(job: Job, began: Start, sharing: int, result: TrialResult, runs: Path) -> TrialRecord:
    """The record of a trial that has trained, with its weights on disk."""
    try:
        return _record(job, began, sharing, result=result, runs=_with_weights(job, result, runs))
    except Exception as error:
        if is_of_disk(error):
            raise
        return _record(job, began, sharing, error=traceback.format_exc())


def _with_weights(job: Job, result: TrialResult, runs: Path) -> list[RunRecord]:
    """The records of the runs. Weights of a confirmation are written to disk, whole or not at all."""
    records = []
    for run in result.runs:
        artifacts = []
        if job.stage == "confirm" and run.diverged_at is None:
            file = runs / "weights" / job.key / f"seed_{run.seed}.pt"
            save(run.weights, file)
            with disk():
                digest = hashlib.sha256(file.read_bytes()).hexdigest()
            artifacts.append(ArtifactRecord("weights", str(file), digest, file.stat().st_size))
        state = "done" if run.diverged_at is None else "diverged"
        records.append(RunRecord(run.seed, state, run.diverged_at, run.metrics, artifacts))  # type: ignore[arg-type]
    return records


def _record(
    job: Job,
    began: Start,
    sharing: int,
    *,
    result: TrialResult | None = None,
    runs: list[RunRecord] | None = None,
    error: str | None = None,
) -> TrialRecord:
    """Makes the record of a trial that began at `began`. The `sharing` trials of its stack share the time equally."""
    seconds = time.monotonic() - began.monotonic
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
        started_at=began.of_day,
        finished_at=began.of_day + seconds,
        seconds=seconds / sharing,
        parameters=result.parameters if result else None,
        state_size=result.state_size if result else None,
        tokens_per_second=result.tokens_per_second if result else None,
        hardware=result.hardware if result else {},
        rule=RuleRecord(rule, digest, job.rule_source),
        runs=runs or [],
    )
